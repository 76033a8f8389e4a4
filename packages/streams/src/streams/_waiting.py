"""The threads, locks and queues of pipes, under one name, so that a test can replace all of them.

A pipe makes each object on which a thread may wait as an attribute of this module, such as ``waiting.Lock()``. These
are the standard library's own classes, so that this costs nothing. A test that replaces the attributes by its own
classes decides which thread runs, and so can try every order of events.

``threading.local`` and ``threading.current_thread`` are not here, because no thread waits for them.
"""

from concurrent.futures import Future as Future
from concurrent.futures import ThreadPoolExecutor as ThreadPoolExecutor
from queue import SimpleQueue as SimpleQueue
from threading import Condition as Condition
from threading import Event as Event
from threading import Lock as Lock
from threading import RLock as RLock
from threading import Semaphore as Semaphore
from threading import Thread as Thread
