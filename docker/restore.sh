#!/bin/sh
# restore.sh FOLDER: put both databases back as backup.sh saved them. Stop Temporal first: what is there now is dropped.
set -eu
for name in temporal temporal_visibility; do
    test -f "$1/$name.dump" || { echo "error: $1/$name.dump is not there: name a folder that backup.sh printed" >&2; exit 2; }
done
for name in temporal temporal_visibility; do
    dropdb --if-exists "$name"
    createdb "$name"
    pg_restore --exit-on-error --dbname="$name" "$1/$name.dump"
done
