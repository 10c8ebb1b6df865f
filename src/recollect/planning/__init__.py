"""Planning: from one recorded step to what is kept, recomputed and offloaded under a budget."""
