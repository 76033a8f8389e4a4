"""The exit of the interpreter neither waits for idle and blocked workers nor kills those that compute."""

import os
import subprocess
import sys
from textwrap import dedent

import pytest

# Three workers that nobody ends: one idle, one computing for ever, one waiting for ever.
SCRIPT = dedent("""
    import atexit, queue, sys, threading, torch
    # Registered before the import, so it runs after what the import registers.
    atexit.register(lambda: print("the idle one said", outs[0].get(timeout=0)))
    from streams import CPUStream, Task, spawn_workers

    def compute():
        x = torch.ones(200, 200, requires_grad=True)
        while True:
            (x @ x).sum().backward()
            busy.set()

    def stuck():
        waiting.set()
        queue.SimpleQueue().get()

    busy, waiting = threading.Event(), threading.Event()
    block = spawn_workers([torch.device("cpu")] * 3, shared=False)
    (_, *ins), outs = block.__enter__()
    for in_queue, work in zip(ins, (compute, stuck), strict=True):
        in_queue.put(Task(CPUStream, compute=work))
        in_queue.put(Task(CPUStream, compute=lambda: print("this was queued behind", flush=True)))
    busy.wait(), waiting.wait()
    sys.exit(7)
""")


# A worker that nobody ends is inside one operation of a second or more. The interpreter is not through with its exit
# before the thread is gone, whatever that does to the process.
LONG_OPERATION = dedent("""
    import os, sys, threading, torch
    from streams import CPUStream, Task, spawn_workers

    class Last:
        def __del__(self, exists=os.path.exists, go_on=os.sched_yield):
            while exists(path):
                go_on()

    def compute():
        global path
        path = f"/proc/self/task/{threading.get_native_id()}"
        x = torch.eye(1000)
        computing.set()
        torch.linalg.matrix_power(x, 2**60)

    last, computing = Last(), threading.Event()
    block = spawn_workers([torch.device("cpu")])
    [in_queue], _ = block.__enter__()
    in_queue.put(Task(CPUStream, compute=compute))
    computing.wait()
    sys.exit(7)
""")


def run(script):
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


def test_workers_neither_hold_up_the_interpreters_exit_nor_change_its_status():
    assert run(SCRIPT) == (7, "the idle one said (False, None)\n", "")


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs /proc to see a thread end")
def test_the_exit_waits_for_the_end_of_a_long_operation():
    assert run(LONG_OPERATION) == (7, "", "")


# A fork beside a worker that waits for ever: the child has none, and exits as any process does.
FORKED = dedent("""
    import os, queue, sys, threading, torch
    from streams import spawn_workers, submit

    def stuck():
        waiting.set()
        queue.SimpleQueue().get()

    waiting = threading.Event()
    block = spawn_workers([torch.device("cpu")])
    [in_queue], _ = block.__enter__()
    submit(in_queue, stuck)
    waiting.wait()
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.exit(7 if child else 5)
""")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_exits_without_the_workers_of_its_parent():
    assert run(FORKED) == (7, "5\n", "")
