"""The call from Python: the arguments of `fit`, what travels to the tasks, the callbacks in the caller's process."""
