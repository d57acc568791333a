"""The commands of ``simcse-weince``, a module each, and what their command lines share."""
