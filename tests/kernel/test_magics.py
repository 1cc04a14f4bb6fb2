"""The magics in a real kernel: what they show, what they refuse, and what they leave as it was."""

from __future__ import annotations

import json
import re
import time

import pytest

from tests.kernels import Kernel
from tests.thorough import THOROUGH
from tests.zoo.cases import FAILED, PRELUDE, TRAINED


@pytest.fixture
def notebook(kernel: Kernel) -> Kernel:
    """A kernel with the zoo's helpers and nbguard."""
    kernel.run(PRELUDE).ok()
    kernel.run("%load_ext nbguard").ok()
    return kernel


def test_report_names_holders_and_their_cells(notebook: Kernel) -> None:
    notebook.run(TRAINED).ok()
    notebook.run(
        "losses = [learn.loss_func(learn.model(torch.randn(4, 16)), torch.tensor([0, 1, 2, 0])) for _ in range(9)]"
    ).ok()

    cell = notebook.run("%gpumem --all").ok()

    assert cell.text.splitlines()[0] == "No GPU in this process: CPU tensors are tracked instead"
    assert "learn " in cell.text
    assert "In[3]" in cell.text
    assert "Learner · Net · Adam" in cell.text
    assert cell.stdout == ""
    assert cell.stderr == ""
    assert set(cell.bundles[0]) == {"text/plain", "text/html"}
    assert len(cell.bundles) == 1


def test_names_that_a_script_binds_again_are_of_the_cell_that_ran_it(notebook: Kernel) -> None:
    (notebook.cwd / "rows.py").write_text("import torch\nrows, more = torch.ones(2**18), torch.ones(2**19)\n")
    notebook.run("rows = torch.ones(2**17)").ok()
    notebook.run("%run rows.py").ok()
    notebook.run("exec('other = torch.ones(2**18)')").ok()

    text = notebook.run("%gpumem --all").ok().text

    since = {line.split()[0]: re.findall(r"In\[\d+\]", line) for line in text.splitlines() if "Tensor" in line}
    assert since == {"rows": ["In[4]"], "more": ["In[4]"], "other": ["In[5]"]}


def test_the_cycle_of_an_earlier_error_is_told_by_it(notebook: Kernel) -> None:
    notebook.run("import gc; gc.disable()").ok()
    notebook.run(
        "def f(d):\n    opt = torch.optim.SGD([nn.Parameter(torch.zeros(1 << 18))], lr=1.)\n    return d + opt.missing"
    ).ok()
    for _ in range(2):
        assert notebook.run("f(1)").error is not None

    text = notebook.run("%gpumem --all").ok().text

    assert "an earlier AttributeError with its SGD, in a cycle through its own traceback" in text
    assert "freed 2 MiB of 2 MiB" in notebook.run("%reset_gpu").ok().text


_TOTAL = "sum(holder.retained for device in {}.devices for holder in device.holders)"


def test_the_graphs_of_a_name_are_a_finding_with_the_line_that_frees_them(notebook: Kernel) -> None:
    notebook.run("net, x = Net(), torch.randn(40_000, 16)").ok()
    for made, line, freed in (
        ("out = net(x)", "out = out.detach()", 1),
        ("out = [net(x) for _ in range(7)]", "out[:] = [each.detach() for each in out]", 7),
        ("out = {key: net(x) for key in 'abc'}", "out.update({key: each.detach() for key, each in out.items()})", 3),
        ("out = [net(x) for _ in range(7)]; other = out[2]", "out[:] = [each.detach() for each in out]", 6),
        ("out = [net(x), 3.0]", "out[0].detach_();", 1),
        ("out = net(x); alias = out", "%gpumem why out", 0),
        ("alias = 0; out = net(x); out_loss = out.square().mean()", "out_loss = out_loss.detach(); out = out.detach()", 1),
    ):
        notebook.run(f"other = None; {made}").ok()
        notebook.run("%gpumem -o before").ok()
        ((command, frees),) = notebook.value(
            "[(f.advice.command, f.advice.frees) for f in before.findings if f.kind == 'graph' and f.sentence.startswith('out')]"
        )
        notebook.run(command).ok()
        notebook.run("%gpumem -o after").ok()

        assert command == line
        assert notebook.value(f"{_TOTAL.format('before')} - {_TOTAL.format('after')}") == (frees or 0) >= freed * 2**20


def test_why_shows_the_paths_and_how_to_cut_them(notebook: Kernel) -> None:
    notebook.run(TRAINED).ok()
    notebook.run("go = learn.fit").ok()

    text = notebook.run("%gpumem why learn").ok().text

    assert "go.__self__" in text
    assert "%reset_gpu go" in text


def test_json_holds_bytes_that_re_add(notebook: Kernel) -> None:
    notebook.run(TRAINED).ok()

    data = json.loads(notebook.run("%gpumem --json").ok().text)

    (device,) = data["devices"]
    assert sum(holder["retained"] for holder in device["holders"]) == device["allocated"] > 0


def test_output_option_keeps_the_report_and_nothing_else_alive(notebook: Kernel) -> None:
    notebook.run(TRAINED).ok()
    notebook.run("%gpumem -o report").ok()
    notebook.run("del learn").ok()

    assert notebook.value("type(report).__name__") == "Report"
    assert notebook.value("(gc.collect(), all(gone() for gone in builtins._tracked['model']))[1]")


def test_an_assigned_magic_returns_its_result_and_a_bare_one_leaves_nothing_in_out(notebook: Kernel) -> None:
    notebook.run(TRAINED).ok()

    cell = notebook.run("plan = %reset_gpu --dry-run").ok()
    notebook.run("%gpumem").ok()

    assert len(cell.bundles) == 1
    assert notebook.value("(type(plan).__name__, dict(Out))") == ("Plan", {})


@pytest.mark.parametrize(
    "line",
    [
        "%gpumem",
        "%gpumem why learn",
        "%gpumem --json",
        "%reset_gpu --dry-run",
        "%reset_gpu",
        "%reset_gpu number",
        "%reset_gpu lern",
    ],
)
def test_no_magic_keeps_an_object_alive(notebook: Kernel, line: str) -> None:
    notebook.run("number = 3\n" + TRAINED).ok()
    notebook.run(line)
    notebook.run("del learn").ok()

    assert notebook.value("(gc.collect(), all(gone() for found in builtins._tracked.values() for gone in found))[1]")


def test_dry_run_touches_nothing_and_promises_what_is_freed(notebook: Kernel) -> None:
    notebook.run(TRAINED).ok()
    notebook.run("learn").ok()
    notebook.run("del learn").ok()

    plan = notebook.run("%reset_gpu --dry-run -o plan").ok().text
    alive = notebook.value("not any(gone() for gone in builtins._tracked['model'])")
    notebook.run("%reset_gpu -o outcome").ok()

    assert "nothing was touched" in plan
    assert alive
    assert notebook.value("(plan.promised == outcome.realised, outcome.extra, outcome.survivors)") == (True, 0, ())


def test_all_is_no_less_than_the_cleanup_without_it(notebook: Kernel) -> None:
    """A displayed Learner that has no name any more is stale: it goes with all names, too, but one after --keep stays."""
    notebook.run(TRAINED).ok()
    notebook.run("learn").ok()
    notebook.run("del learn; kept, loose = torch.ones(1 << 20), torch.ones(2 << 20)").ok()

    notebook.run("%reset_gpu --all --keep kept -o outcome").ok()
    notebook.run("%reset_gpu --dry-run -o again").ok()

    assert notebook.value("all(gone() for gone in builtins._tracked['model'])")
    assert notebook.value("('kept' in globals(), 'loose' in globals())") == (True, False)
    assert notebook.value("outcome.plan.promised == outcome.realised")
    assert notebook.value("(again.promised, again.storages)") == (0, frozenset())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%reset_gpu lern", "name 'lern' does not exist: did you mean learn?"),
        ("%reset_gpu qqzzqq", "name 'qqzzqq' does not exist (%gpumem lists those that hold memory)"),
        ("%reset_gpu learn runs['zz']", "runs['zz'] does not exist: there is no such key"),
        ("%reset_gpu learn.nothing_here", "learn.nothing_here does not exist: Learner has no such attribute"),
        ("%reset_gpu 3", "3 is not something that can be freed"),
        ("%reset_gpu f()", "f() is not something that can be freed"),
        ("%reset_gpu runs['a", "' is missing"),
        ("%reset_gpu Out[77]", "Out[77] does not exist"),
        ("%reset_gpu get_ipython", "IPython's own"),
        ("%reset_gpu --al", "unrecognized arguments: --al: did you mean --all?"),
        ("%reset_gpu --dryrun", "did you mean --dry-run?"),
        ("%reset_gpu --unpark lern", "nothing is parked as lern"),
        ("%reset_gpu learn.modle", "learn.modle does not exist: Learner has no such attribute; did you mean model?"),
        ("%gpumem why learn.modle", "learn.modle does not exist: Learner has no such attribute; did you mean model?"),
        ("%gpumem why number.modle", "number.modle does not exist: int has no such attribute"),
        ("%gpumem why runs['b'].x", "runs['b'] does not exist"),
        ("%reset_gpu learn --all", "argument --all: not allowed with argument targets"),
        ("%reset_gpu --all --keep lern", "did you mean learn?"),
        ("%gpumem why", "give one name"),
        ("%gpumem why lern", "did you mean learn?"),
        ("%gpumem why number", "leads to no tensor"),
        ("%gpumem hsitory", "there is no word 'hsitory': did you mean history?"),
        ("%gpumem zzz learn", "there is no word 'zzz': say one of why, oom, map"),
        ("%gpumem --jsno", "did you mean --json?"),
        ("%gpumem cells om", "'om' is not one of on, off: say on or off"),
        (
            "%gpumem leak x f()",
            "'x' is not a number of runs: give a number of runs and what to run, as in  %gpumem leak 3 predict(x)",
        ),
        ("%gpumem predict learn --bs 0", "argument --bs: '0' is not a number of items, as in  --bs 32 (%gpumem predict? "),
        ("%gpumem predict learn --gpu 16", "16 has no unit"),
        ("%gpumem predict learn --gpu toaster", "None of these? Give a size, as in 16GiB"),
        ("%gpumem map --request 16", "16 has no unit"),
        ("%nbguard doctr", "did you mean doctor?"),
        ("%profile_fit --memry", "did you mean --memory?"),
        ("%gpumem why learn runs", "unrecognized arguments: runs: give one name, as in  %gpumem why learn"),
        ("%gpumem map --entries 3", "--entries belongs to record, as in  %gpumem record --entries N"),
        ("%gpumem map --request 1GiB --file a.pickle", "--file: not allowed with argument --request"),
        ("%gpumem -n 0 map", "1 or more"),
        ("%gpumem record off --entries 3", "--entries needs record on"),
        ("%nbguard on learn", "unrecognized arguments: learn"),
        ("%gpumem --device 7", "no device 7 here; there is: cpu"),
        ("%gpumem -n many", "'many' is not a number of rows"),
        ("%gpumem -n 0", "1 or more"),
        ("%gpumem -o 3x", "3x is not the name of a variable: write it as in  -o report"),
    ],
)
def test_bad_input_is_one_line_and_loses_nothing(shared_notebook: Kernel, line: str, message: str) -> None:
    before = shared_notebook.value("sorted(n for n in globals() if n in ('learn', 'runs', 'number'))")

    cell = shared_notebook.run(line)

    assert cell.error is not None
    assert cell.error[0] == "UsageError"
    assert message in cell.stderr + cell.error[1]
    assert "Traceback" not in cell.stderr
    assert len((cell.stderr or cell.error[1]).strip().splitlines()) == 1
    assert shared_notebook.value("sorted(n for n in globals() if n in ('learn', 'runs', 'number'))") == before
    assert shared_notebook.value("sorted(runs)") == ["a"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%gpumem doctor --environment", "doctor is a word of %nbguard: run  %nbguard doctor --environment"),
        ("%gpumem doctor --help", "doctor is a word of %nbguard: run  %nbguard doctor --help"),
        ("%gpumem doctor?", "doctor is a word of %nbguard: run  %nbguard doctor --help"),
        ("%gpumem fix determinism", "fix is a word of %nbguard: run  %nbguard fix determinism"),
        ("%nbguard why learn", "why is a word of %gpumem: run  %gpumem why learn"),
        ("%nbguard map", "map is a word of %gpumem: run  %gpumem map"),
        ("%nbguard --dry-run", "--dry-run belongs to %reset_gpu: run  %reset_gpu --dry-run"),
        ("%reset_gpu --json --request 2GiB", "--request belongs to %gpumem: run  %gpumem map --json --request 2GiB"),
        ("%gpumem learn --dry-run", "learn is a name: run  %gpumem why learn  to see what keeps it alive"),
        ("%gpumem why learn --dry-run", "--dry-run belongs to %reset_gpu: run  %reset_gpu learn --dry-run"),
        ("%gpumem learn", "learn is a name: run  %gpumem why learn  to see what keeps it alive"),
        ("%reset_gpu status", "status is a word of %nbguard: run  %nbguard status"),
        ("%reset_gpu --device cpu", "--device belongs to %gpumem: run  %gpumem --device cpu"),
        ("%nbguard schema whatif", "schema is a command of the terminal: run  !nbguard schema whatif"),
    ],
)
def test_what_belongs_to_another_command_is_told_with_the_line_to_run(shared_notebook: Kernel, line: str, message: str) -> None:
    cell = shared_notebook.run(line)

    said = cell.stderr + cell.error[1] if cell.error else ""
    assert message in said
    assert len(said.strip().splitlines()) <= 2
    (command,) = re.findall(r"run  (.+?)(?:  to see.*)?$", said, re.MULTILINE)[:1]
    shared_notebook.run(command).ok()
    shared_notebook.run("%nbguard fix determinism --undo" if "fix" in line else "pass").ok()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "%gpumem fix",
            "fix is a word of %nbguard: name a fix and a Learner, as in  %nbguard fix determinism learn",
        ),
        ("%nbguard predict", "predict is a word of %gpumem: give one Learner, as in  %gpumem predict learn --gpu 16GiB"),
        ("%gpumem --park", "--park belongs to %reset_gpu: %reset_gpu? shows the options"),
    ],
)
def test_what_lacks_an_argument_there_is_told_with_an_example(shared_notebook: Kernel, line: str, message: str) -> None:
    cell = shared_notebook.run(line)

    assert cell.error is not None
    assert message in cell.stderr + cell.error[1]


@pytest.fixture(scope="module")
def shared_notebook(fastai_zygote):  # type: ignore[no-untyped-def]
    """One kernel for all that must change nothing anyway."""
    kernel = Kernel(fastai_zygote, frozen=not THOROUGH)
    kernel.run(PRELUDE).ok()
    kernel.run("%load_ext nbguard\nlearn = learner(); runs = {'a': torch.ones(3)}; number = 3").ok()
    yield kernel
    kernel.stop()


def test_a_target_without_device_memory_is_left_as_it_is(shared_notebook: Kernel) -> None:
    cell = shared_notebook.run("%reset_gpu number").ok()

    assert "number (int) leads to no tensor, model or loader on cpu: left as it is" in cell.text
    assert shared_notebook.value("number") == 3


@pytest.mark.parametrize("line", ["%gpumem map?", "%gpumem map --help", "%gpumem map ?", "\n%gpumem map??\n"])
def test_help_on_a_word_shows_its_own_options_only(shared_notebook: Kernel, line: str) -> None:
    text = shared_notebook.run(line).ok().stdout

    assert text.startswith("usage: %gpumem map")
    assert all(option in text for option in ("--request SIZE", "--file FILE", "--device N", "-n ROWS", "--json", "-o NAME"))
    assert not any(option in text for option in ("--entries", "--set", "--settings", "--capacity"))


def test_help_on_a_magic_shows_its_words(shared_notebook: Kernel) -> None:
    asked = shared_notebook.run("%gpumem --help").ok().stdout
    inspected = shared_notebook.value("get_ipython().find_line_magic('gpumem').getdoc()")

    for text in (asked, inspected):
        assert all(
            word in text
            for word in ("why NAME", "oom", "map", "history", "cells on|off", "simulate 16GiB|off", "record on|off")
        )
        assert all(word in text for word in ("snapshot FILE", "load FILE", "diff BEFORE AFTER", "whatif", "--device N"))
        assert "--entries" not in text
    assert "usage: %nbguard on" in shared_notebook.run("%nbguard on?").ok().stdout
    assert "status" in shared_notebook.run("%nbguard --help").ok().stdout
    assert "--dry-run" in shared_notebook.run("%reset_gpu --help").ok().stdout


def test_help_on_a_word_is_nothing_but_that(shared_notebook: Kernel) -> None:
    """A question about a name of the user's, or a text that looks like one, stays as it is."""
    shared_notebook.run("text = '''\n%gpumem map?\n'''").ok()

    assert shared_notebook.value("text") == "\n%gpumem map?\n"
    assert shared_notebook.run("map?").ok().stdout == ""


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("r = %gpumem -n 3  # who holds it", "type(r).__name__"),
        ("%gpumem -o r # who holds it", "type(r).__name__"),
        ("%gpumem --json -o r", "type(r).__name__"),
    ],
)
def test_a_comment_ends_the_line(shared_notebook: Kernel, line: str, value: str) -> None:
    shared_notebook.run("r = None")
    shared_notebook.run(line).ok()

    assert shared_notebook.value(value) == "Report"


def test_a_hash_in_a_name_is_no_comment(shared_notebook: Kernel) -> None:
    cell = shared_notebook.run("%gpumem why runs['#1']  # of the first run")

    assert cell.error is not None
    assert "runs['#1'] does not exist" in cell.stderr + cell.error[1]


def test_options_may_stand_before_the_word(shared_notebook: Kernel) -> None:
    asked = shared_notebook.run("%gpumem --json why learn").ok()

    assert "learn" in json.loads(asked.text)["name"]


def test_help_shows_every_option(shared_notebook: Kernel) -> None:
    for magic in ("reset_gpu", "profile_fit"):
        asked = shared_notebook.value(f"get_ipython().object_inspect_text({'%' + magic!r})")
        read = shared_notebook.run(f"%{magic} --help").ok().stdout

        options = ("--dry-run", "--keep", "--all", "--json", "-o NAME") if magic == "reset_gpu" else ("--memory", "-o NAME")
        assert all(option in text for option in options for text in (asked, read))
        assert ("Only references are removed" if magic == "reset_gpu" else "any loop over PyTorch") in asked


def test_without_torch_one_line_says_so(plain_kernel: Kernel) -> None:
    plain_kernel.run("%load_ext nbguard").ok()

    for line in ("%gpumem", "%reset_gpu", "%reset_gpu --dry-run"):
        cell = plain_kernel.run(line)
        assert cell.error is not None
        assert "PyTorch is not imported in this kernel yet" in cell.stderr + cell.error[1]
    assert plain_kernel.value("'torch' in __import__('sys').modules") is False


def test_torch_imported_after_loading_works(plain_kernel: Kernel) -> None:
    plain_kernel.run("%load_ext nbguard").ok()
    plain_kernel.run("import torch; t = torch.ones(1 << 20)").ok()

    assert "4 MiB" in plain_kernel.run("%gpumem").ok().text


def test_loading_and_unloading_leave_ipython_as_found(plain_kernel: Kernel) -> None:
    state = (
        "(sorted(get_ipython().magics_manager.magics['line']), sorted(get_ipython().magics_manager.registry),"
        " {k: len(v) for k, v in get_ipython().events.callbacks.items()}, sorted(get_ipython().user_ns),"
        " len(get_ipython().input_transformers_post), len(get_ipython().ast_transformers))"
    )
    before = plain_kernel.value(state)

    for line in ("load_ext", "reload_ext", "reload_ext", "unload_ext"):
        plain_kernel.run(f"get_ipython().run_line_magic('{line}', 'nbguard')").ok()

    after = plain_kernel.value(state)
    # IPython's own, since version 8 made when it is first used: by %load_ext
    assert {*after[1]} == {*before[1], "ExtensionMagics"}
    assert [after[0], after[2], after[4], after[5]] == [before[0], before[2], before[4], before[5]]
    assert {n for n in after[3] if not n.startswith("_i")} == {n for n in before[3] if not n.startswith("_i")}


def test_a_magic_of_the_users_with_the_same_name_comes_back(plain_kernel: Kernel) -> None:
    plain_kernel.run("get_ipython().register_magic_function(lambda line: 'mine', 'line', 'gpumem')").ok()
    plain_kernel.run("%load_ext nbguard\n%unload_ext nbguard").ok()

    assert plain_kernel.run("%gpumem").ok().text == "'mine'"


def test_debug_works_before_and_after_a_cleanup(notebook: Kernel) -> None:
    cell = notebook.run(FAILED)
    assert cell.error is not None
    notebook.run("del learn").ok()

    notebook.run("%reset_gpu").ok()
    text = notebook.run("%debug", inputs=("p self", "u", "p self", "q")).ok().stdout
    traceback = notebook.run("%tb")

    assert "released by %reset_gpu" in text
    assert "failed on purpose" in traceback.stderr + traceback.stdout + str(traceback.error)
    assert notebook.value("all(gone() for gone in builtins._tracked['model'])")


def test_a_released_frame_keeps_its_other_variables(notebook: Kernel) -> None:
    notebook.run("def f(name):\n    big = torch.ones(1000); track('big', big); count = 41\n    raise ValueError(name)").ok()
    notebook.run("f('why')")

    notebook.run("%reset_gpu").ok()
    text = notebook.run("%debug", inputs=("p name, count, big", "q")).ok().stdout

    assert "('why', 41, <released by %reset_gpu: Tensor 1000 float32>)" in text
    assert notebook.value("all(gone() for gone in builtins._tracked['big'])")


def test_run_all_stops_at_an_error_as_without_nbguard(notebook: Kernel) -> None:
    """Cells queued behind one that fails, in the user's code or in a magic's line, are not run."""
    for failing in ("1 / 0", "%reset_gpu qqzzqq"):
        notebook.run("ran = False").ok()
        first = notebook.client.execute(failing, stop_on_error=True)
        second = notebook.client.execute("ran = True")
        replies = {}
        while len(replies) < 2:
            message = notebook.client.get_shell_msg(timeout=60)
            replies[message["parent_header"]["msg_id"]] = message["content"]["status"]
        assert replies[first] == "error"
        assert replies[second] == "aborted"
        time.sleep(0.3)
        assert notebook.value("ran") is False


def test_an_interrupt_during_a_cleanup_is_reported_step_by_step(notebook: Kernel) -> None:
    """The interrupt falls into `del runs['a']`. That step and those after it, of wholes, are not done, and said not to be."""
    notebook.run(
        "class Slow(dict):\n    def __delitem__(self, key): os.kill(os.getpid(), signal.SIGINT); time.sleep(.2)\n"
        "first = [[torch.ones(50)]]; runs = Slow(a=torch.ones(100)); second = torch.ones(200); track('second', second)\n"
        "handler = signal.getsignal(signal.SIGINT)"
    ).ok()

    cell = notebook.run("%reset_gpu second runs['a'] first[0][0]").ok()

    assert "runs['a'] not deleted: interrupted while it ran" in cell.text
    assert "second not deleted: interrupted" in cell.text
    assert "interrupted: run %reset_gpu again to finish" in cell.text
    assert "freed 200 B of 1.37 KiB promised" in cell.text
    assert notebook.value("(first, 'second' in globals(), builtins._tracked['second'][0]())") == (
        [[]],
        True,
        False,
    )
    assert notebook.value("signal.getsignal(signal.SIGINT) is handler")


def test_an_interrupt_while_looking_changes_nothing_and_keeps_nothing(notebook: Kernel) -> None:
    """The interrupt falls into the middle of the look. Its frames, IPython's last error, must not hold the user's objects."""
    notebook.run("t = torch.ones(77); track('t', t)").ok()
    notebook.run(
        "import nbguard.memory.scan.scan as inside\ncompact = inside.compact\n"
        "def interrupted(*args): os.kill(os.getpid(), signal.SIGINT); time.sleep(5); return compact(*args)\n"
        "inside.compact = interrupted"
    ).ok()

    for line in ("%gpumem", "%reset_gpu", "%reset_gpu t"):
        cell = notebook.run(line)
        assert cell.error == (
            "KeyboardInterrupt",
            f"{line.split()[0]} was interrupted during its scan; nothing was changed",
        )

    assert notebook.value("('t' in globals(), gc.isenabled())") == (True, True)
    notebook.run("del t").ok()
    assert notebook.value("builtins._tracked['t'][0]()")


def test_a_second_thread_is_refused_while_a_cleanup_runs(notebook: Kernel) -> None:
    notebook.run(
        "import threading, nbguard\nclass Nested:\n    def __init__(self, t): self.t = t\n    def __del__(self):\n"
        "        try: nbguard.release()\n        except nbguard.NbguardError as error: builtins.said = str(error)\nnested = Nested(torch.ones(3))"
    ).ok()

    notebook.run("%reset_gpu nested").ok()

    assert notebook.value("builtins.said") == "another cleanup is running: wait for it to end, then try again"


def test_the_result_takes_the_place_of_the_line_of_progress(plain_kernel: Kernel) -> None:
    """A line on standard error would stay as an empty red bar in the notebook."""
    plain_kernel.run("import torch, nbguard.memory.scan.progress as progress\n%load_ext nbguard\nprogress._PATIENCE = 0.0").ok()
    plain_kernel.run("many = [[torch.ones(1)] for _ in range(2_000)]").ok()
    plain_kernel.run("from nbguard.frontend.notebook.display import ProgressLine\nformer, said = ProgressLine.say, []").ok()
    plain_kernel.run("ProgressLine.say = lambda line, words: (said.append(words), former(line, words))").ok()

    report = plain_kernel.run("print('before')\n%gpumem").ok()
    plan = plain_kernel.run("%reset_gpu --dry-run").ok()
    wrong = plain_kernel.run("%reset_gpu nobody")

    assert (report.stderr, report.stdout, len(report.bundles)) == ("", "before\n", 1)
    assert (plan.stderr, len(plan.bundles)) == ("", 1)
    assert "many" in report.text
    assert wrong.text == ""
    assert plain_kernel.value("len(said)") > 2
