#!/bin/sh
# Makes and updates Temporal's two databases; safe to repeat, and part of every start: a newer server wants its tables first.
set -eu
schema=/etc/temporal/schema/postgresql/v12
for name in temporal temporal_visibility; do
    folder=temporal
    [ "$name" = temporal ] || folder=visibility
    temporal-sql-tool --plugin postgres12 --ep postgres -p 5432 -u temporal --db "$name" create
    temporal-sql-tool --plugin postgres12 --ep postgres -p 5432 -u temporal --db "$name" setup-schema -v 0.0
    temporal-sql-tool --plugin postgres12 --ep postgres -p 5432 -u temporal --db "$name" update-schema -d "$schema/$folder/versioned"
done
