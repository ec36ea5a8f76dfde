"""Tab completion: what may stand next on a command line (`answers`), and the shells that ask (`shells`)."""
