"""At exit, the interpreter does not wait for idle or blocked workers, and does not kill busy ones."""

from textwrap import dedent

from .fakes import in_fresh_process

# Three workers that are never stopped: one idle, one computing forever, one waiting forever.
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


def test_workers_do_not_affect_interpreter_exit():
    done = in_fresh_process(SCRIPT)
    assert (done.returncode, done.stdout, done.stderr) == (7, "the idle one said (False, None)\n", "")
