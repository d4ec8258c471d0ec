"""A package of a user's own: sensors are read, by a source, a field, a model and a task that vlm knows nothing of."""
