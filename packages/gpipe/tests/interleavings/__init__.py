"""Programs with small pipes, for every order of events: see ``packages/streams/tests/interleavings``.

- ``scenarios``: a pipe, a step, and everything that must be true afterwards.
- ``catalogue``: the scenarios by name.
- ``several``: programs with several callers or pipes.
- ``__main__``: explores them, and repeats one run.
"""
