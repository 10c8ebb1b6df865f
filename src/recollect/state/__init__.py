"""State around a region or a step, captured and put back: inputs, modules, tensors, streams."""
