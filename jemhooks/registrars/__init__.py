"""Who registers memory: one module per kind."""
