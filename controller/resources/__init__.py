"""One file per kind of thing: how it is observed, made and removed."""
