"""One line in the training frameworks: `integrations.transformers` and `integrations.lightning`."""
