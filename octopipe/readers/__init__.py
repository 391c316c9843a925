"""Other people's descriptions of models and plans, read: a module each. Knows formats; not what a model costs."""
