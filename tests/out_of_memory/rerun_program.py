"""A program that runs a notebook on a fake or simulated device, follows the card's advice, and runs the failed cell again."""

from __future__ import annotations

PROGRAM = r'''
import io, json, os, sys, contextlib, time, types
spec = json.loads(SPEC)
if spec["others"]:
    there, go = os.pipe(), os.pipe()
    other = os.fork()
    if other == 0:
        os.close(go[1])
        import torch
        kept = torch.empty(spec["others"] << 20, dtype=torch.uint8, device="cuda")
        os.write(there[1], b"x"); os.read(go[0], 1); os._exit(0)
    os.close(go[0])
    os.read(there[0], 1)
from IPython.core.interactiveshell import InteractiveShell
import nbguard, torch
from nbguard.memory.scan.oom.chain import NOTES
from nbguard.frontend.notebook.session import session_of
from nbguard.memory.scan.oom.failed_runs import _Latest
shell = InteractiveShell.instance(user_module=types.ModuleType("__main__"))
shell.history_manager.enabled = False

def run(source):
    """Run a cell; return (error, blocks that it had made until it ended)."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        result = shell.run_cell(source, store_history=True)
    error = result.error_before_exec or result.error_in_exec
    return None if error is None else f"{type(error).__name__}: {str(error)[:300]}"

def ok(source):
    error = run(source)
    assert error is None, (source, error)

def made():
    """Return the bytes that the cell that ran last had asked for when it failed."""
    note, start = NOTES[-1], _Latest.start
    before = start.devices.get(note.device)
    return note.counts.made - (before.made if before else 0), note.counts.made_blocks - (before.made_blocks if before else 0)

def allocated(device):
    """Return the bytes in tensors on a device."""
    simulation = session_of(shell).memory.simulation
    return torch.cuda.memory_allocated(device) if simulation is None else simulation.figures().allocated

def follow(fix):
    for command in fix["commands"]:
        if not command.startswith("PYTORCH_"):
            ok(command)
    if "other processes" in fix["words"]:
        os.close(go[1]); os.waitpid(other, 0)

def last_card():
    return session_of(shell).memory.oom() if spec["simulated"] else nbguard.oom()

def as_dict(card):
    return {"fixes": [{"words": f.words, "commands": list(f.commands), "verdict": str(f.verdict), "nbytes": f.nbytes,
                       "enough": f.enough} for f in card.fixes],
            "device": card.device, "took": card.cell_took, "taken": card.taken, "text": card.mimebundle()["text/plain"]}

ok("%load_ext nbguard")
if spec["simulated"]:
    ok("%gpumem simulate 924MiB")
for cell in spec["cells"]:
    ok(cell)
error = run(spec["cell"])
assert error is not None and last_card() is not None, ("it should have run out of memory", error)
failed = [made()]
if spec["between"]:
    for cell in spec["between"]:
        ok(cell)
    error = run(spec["cell"])
    assert error is not None and last_card() is not None, ("it should have run out of memory again", error)
    failed.append(made())
rounds = [{"card": as_dict(last_card()), "made": max(failed)}]
chosen = spec["advice"]
for turn in range(spec["loop"]):
    fixes = rounds[-1]["card"]["fixes"]
    index = chosen if turn == 0 else 0
    if index >= len(fixes):
        break
    fix = fixes[index]
    before = allocated(rounds[-1]["card"]["device"])
    follow(fix)
    rounds[-1]["came_back"] = before - allocated(rounds[-1]["card"]["device"])
    error = run(spec["cell"])
    rounds[-1]["followed"], rounds[-1]["error"] = index, error
    if error is None or last_card() is None:
        break
    rounds.append({"card": as_dict(last_card()), "made": made()})
if spec["others"]:
    with contextlib.suppress(OSError):
        os.close(go[1])
if os.environ.get("NBGUARD_TIMES"):
    import resource
    print("CPU", resource.getrusage(resource.RUSAGE_SELF).ru_utime, file=sys.stderr)
print("RESULT" + json.dumps(rounds))
'''
