"""Tables of several sites: read messy files, agree on a schema without moving rows, and encode rows as features."""
