"""Programs with small pipes, to run in every order of events. See ``packages/streams/tests/interleavings``.

- ``scenarios``: a pipe, a step, and everything that must be true afterwards.
- ``catalogue``: the scenarios by name.
- ``several``: programs with several callers or pipes.
- ``interrupted``: KeyboardInterrupt between the instructions of a step.
- ``planted``: planted faults of order, which the exploration must notice.
- ``soak``: many steps with real signals.
- ``__main__``: explores the programs, or repeats one run.
"""
