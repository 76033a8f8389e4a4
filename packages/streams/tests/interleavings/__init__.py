"""Try every order of events of threads, instead of the orders that the operating system happens to choose.

- ``scheduler``: real threads, one of which runs at a time; which one goes on is a choice.
- ``objects``: locks, queues and threads that leave their waiting to the scheduler.
- ``install``: lets the packages under test use these objects.
- ``choices``: where choices come from: a record, priorities, or the default.
- ``explore``: runs a program once for each order of events, up to a number of preemptions.
- ``programs``: blocks of workers, without a pipe.
- ``interrupts``: KeyboardInterrupt wherever the interpreter may raise one.
"""
