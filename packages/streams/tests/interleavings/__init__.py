"""Try every order of thread events, instead of the orders that the operating system happens to choose.

- ``scheduler``: runs real threads one at a time. Each switch between them is a choice.
- ``objects``: locks, queues and threads that wait in the scheduler.
- ``install``: makes the packages under test use these objects.
- ``choices``: makes the choices, from a record, by priorities, or by default.
- ``explore``: runs a program once per order of events, up to a number of preemptions.
- ``programs``: blocks of workers, without a pipe.
- ``interrupts``: KeyboardInterrupt wherever the interpreter may raise one.
"""
