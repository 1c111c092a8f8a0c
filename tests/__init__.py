"""A package, so that `tests/` itself is never put on the module path: a folder like tests/triton would then be taken
for the library of that name. Helpers are imported as `tests.support.…`.
"""
