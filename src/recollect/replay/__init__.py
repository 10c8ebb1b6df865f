"""The replay engine: write down the ops, run again only those that backward needs."""
