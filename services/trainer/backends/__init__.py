"""How a cell's ranks compute: one file a backend."""
