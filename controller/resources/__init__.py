"""One module per kind of resource: how to observe, create and delete it."""
