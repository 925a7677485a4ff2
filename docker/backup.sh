#!/bin/sh
# backup.sh DIR: Temporal's databases as they are this moment, into a new folder of DIR; prints its name. The server goes on.
# Where Postgres is and who asks is said by PGHOST, PGPORT, PGUSER and PGPASSWORD.
set -eu
folder="$1/$(date -u +%Y%m%dT%H%M%SZ)"
mkdir -p "$1"
mkdir "$folder.part"
for name in temporal temporal_visibility; do
    pg_dump --format=custom --file="$folder.part/$name.dump" "$name"
done
mv "$folder.part" "$folder"
echo "$folder"
