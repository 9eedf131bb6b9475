"""One file per library: how it is opened and stepped. Each runs in an environment of its own."""
