"""One file an experiment: claim, command, expected result, cost."""
