"""One module per verb of the command line, loaded only when that verb runs."""
