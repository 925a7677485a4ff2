"""What a person uses: the commands of `stoa`, local servers, the live block and the report. Nothing imports cli."""
