"""Read in the script's code what a short run may not reach: a resume, a rare stop, the end.

All of it is a WARN at most, because nobody has seen it happen.
"""

import ast
import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any, cast

import project

Above = tuple[ast.AST, ...]  # what a node stands in, the outermost first, from its function on
Found = Iterator[tuple[str, ast.AST, dict[str, Any]]]  # a kind, where, and the facts of its line
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SCOPES = (*DEFINITIONS, ast.Lambda)
LEAVES = (ast.Return, ast.Continue)
# A condition that holds on one rank, or on all but one.
ON_A_RANK = (
    r"(rank|gpu)(?!s)[\w'\")(\[\]]*( % [\w.]+)? (==|!=|<=|>) 0\b"
    r"|rank[\w'\")(]* (not )?in [\[({]-?[01]\b"
    r"|not [\w.]*rank\w*(\(\))?$|is_?(main|master|primary|root|chief|rank)|rank_?(zero|0)\b"
    r"|(main|master)_(process|proc|rank|node|gpu)"
)
OF_OTHERS = re.compile(r"(rank|gpu)\S* (!=|>|not in)|not \S*is_?\w+|not \S*(main|master)_")
COLLECTIVE = re.compile(
    r"(torch\.)?(dist|distributed|c10d)\."
    r"((monitored_)?barrier|all_\w+|broadcast\w*|reduce\w*|gather\w*|scatter\w*)"
    r"|((comm|utils?|misc)\.)?(barrier|synchronize)"
)
# What the number of ranks is called.
RANKS = "(world|gpus|gpu_num|num_gpu|n_?gpu|procs|ranks|replicas|device_count)"
TIMES_RANKS = re.compile(rf"\* .*{RANKS}", re.I)
BY_RANKS = re.compile(rf"( /=? |div_?\()[\w.()]*{RANKS}", re.I)
OF_A_SHARE = re.compile(r"[\w.]*(loss|acc|score)\w* [<>]=? [A-Za-z_]")
STEPS_BY = re.compile(r"^[\w.]*sched\w*\.step\((\w*(?:loss|acc|score)\w*)\)$")
ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
EXITS = re.compile(r"(sys\.|os\._)?exit")
TRAINS = re.compile(r"backward\(|\b_?train\w*\(|\.step\(|scaler\(|zero_grad\(")
BACKWARD = re.compile(r"\.backward\(")
OUT_OF_MEMORY = re.compile("out of memory|OutOfMemory")
OWN_LOSS = re.compile(r"nan\b|finite|isinf|loss[\w.()]* [<>]|[<>]=? [\w.]*loss", re.I)
OWN_BATCH = re.compile(r"\.(sum|any|all|numel|nonzero)\(|\blen\([^()]*\) (==|<) ")
OF_EVALUATION = re.compile("val(?!ue)|test|eval|dev(?!ice)|best", re.I)
# Words of a value on which ranks agree. But dist.reduce() gives it to one rank alone.
AGREES = r"((?<!dist\.)(?<!distributed\.)reduc|gather|broadcast|sync)"
BY_HELPER = re.compile(rf"{AGREES}\w*\(.*{RANKS}", re.I)  # combines, and divides perhaps
DECIDES = re.compile("patience|early_?stop|best|plateau", re.I)
LOADS_MODEL = re.compile(r"state_dict|(self\.|model|net|checkpoint|ckpt)\w* = torch\.load\(")
# What lets one rank come before the others.
FIRST = re.compile(r"if .*rank.*:\s+.*barrier\(|(main|process|rank|zero)_first")
DOWNLOADS = re.compile(
    r"(.*\.)?(url(retrieve|open)|load_url|load_state_dict_from_url|download_(url|file)\w*)"
    r"|requests\.get|(gdown|wget|nltk)\.download\w*"
)
# A number of steps, from the length of a whole data set and the size of a batch.
STEPS = re.compile(
    r"\blen\([^()]*(data|set|sampler)\) //? (?![\w.]*(global|total|effective))"
    r"([\w.\['\"]*(batch|bs)[\w'\"\]]*)",
    re.I,
)
SCHEDULES = re.compile("step|iter|optim|sched", re.I)
# A batch's size for a rank, as it is made of that of all ranks.
DIVIDED = re.compile(rf"([\w.]+)(?: //?= | ?= ?[^=\n]*(?:batch|bsz?)[^=\n]*/[^=\n]*){RANKS}", re.I)
# What combines the results of ranks, in the script or in a package.
COMBINES = re.compile(r"all_?reduce|_?gather|\breduce\(|reduce_|torchmetrics|synchronize_")

WAITS = re.compile(r"\.(wait|is_completed)\(")
# A seed that differs between ranks, or a generator of a rank's own.
OWN_SEED = re.compile(r"seed\w*[ (+=].*(rank|local|gpu|process)|initial_seed|worker_info", re.I)


@dataclass
class Code:
    """A file of the project, and what has to be known of the others."""

    name: str
    text: str
    nodes: list[tuple[ast.AST, Above]]  # what the script can come to
    whole: str  # the text of all files
    on_a_rank: re.Pattern[str]
    alone: set[str]  # functions that rank 0 alone calls


def read(root: Path, names: list[str]) -> Iterator[dict[str, Any]]:
    """Yield what is wrong in files of the project, as events that a rank could tell.

    The first file is the one that the user starts. A run knows better: with the fact ``read``, if
    it came to the line, and with ``guessed``, if it saw what that names. Of lines that are
    ``optional`` it knows nothing if it did not come there.
    """
    texts = {name: project.text_of(root / name) for name in names}
    trees = dict[str, ast.Module]()
    for name, text in texts.items():
        with contextlib.suppress(SyntaxError, ValueError):  # the run says so
            trees[name] = ast.parse(text)
            if name != names[0]:
                trees[name].body = [node for node in trees[name].body if not _is_guarded(node)]
    words = _reached(trees.values())
    nodes = {name: list(_nodes(tree, words)) for name, tree in trees.items()}
    flags = {flag for each in nodes.values() for flag in _flags(each)}
    on_a_rank = re.compile("|".join([ON_A_RANK, *(rf"\b{flag}\b" for flag in sorted(flags))]), re.I)
    whole, alone = "\n".join(texts.values()), set[str]()
    codes = [Code(name, texts[name], nodes[name], whole, on_a_rank, alone) for name in nodes]
    _add_alone(codes, alone)
    for code, rule in product(codes, RULES):
        for kind, node, facts in rule(code):
            line = f"{code.name}:{getattr(node, 'lineno', 1)}"
            yield {"kind": kind, "rank": 0, "clock": -1, "line": line} | facts


def _is_guarded(node: ast.AST) -> bool:
    """Whether a module runs a statement only as the main one."""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def _is_special(node: ast.AST, parent: ast.AST) -> bool:
    """Whether a class has a method that Python or PyTorch calls."""
    name = getattr(node, "name", "")
    return isinstance(parent, ast.ClassDef) and (name == "forward" or name.startswith("__"))


def _reached(trees: Iterable[ast.AST]) -> set[str]:
    """Return the words of the code that the script can come to.

    A word leads to all functions and classes of that name. It may stand in a text, as in a table
    of models.
    """
    words = defaultdict[str, set[str]](set)  # in each function and class, by its name

    def add(node: ast.AST, owner: str) -> None:
        for child in ast.iter_child_nodes(node):
            is_list = isinstance(child, ast.Assign) and ast.unparse(child.targets[0]) == "__all__"
            if is_list or child in getattr(node, "keys", ()):  # such as of addresses
                continue
            inner = owner
            if isinstance(child, DEFINITIONS) and not _is_special(child, node):
                inner = child.name
                words[owner] |= {inner} if child.decorator_list else set()  # perhaps for a table
            text = getattr(child, "id", getattr(child, "attr", getattr(child, "value", "")))
            is_name = isinstance(text, str) and re.fullmatch(r"[\w.]+", text)
            words[inner] |= {*text.split(".")} if is_name else set()
            words[inner] |= {child.name} if isinstance(child, ast.alias) else set()
            add(child, inner)

    for tree in trees:
        add(tree, "")
    found, todo = set[str](), [""]
    while todo:
        new = words[todo.pop()] - found
        found |= new
        todo += new & words.keys()
    return found


def _add_alone(codes: list[Code], alone: set[str]) -> None:
    """Add the names of functions that rank 0 alone calls, also by another one of them."""
    calls = defaultdict[str, list[tuple[ast.AST, Above, Code]]](list)
    for code in codes:
        for call, name, above in _calls(code):
            calls[name.rpartition(".")[2]].append((call, above, code))
        for node, above in code.nodes:
            if isinstance(node, ast.alias) and node.asname:  # it is called by another name
                calls[node.name].append((node, above, code))
    size = -1
    while size < len(alone):
        size = len(alone)
        for name, places in calls.items():
            if name not in alone and all(_is_of_rank_0(*place) for place in places):
                alone.add(name)


def _flags(nodes: list[tuple[ast.AST, Above]]) -> Iterator[str]:
    """Yield the names of variables that are true on one rank, such as ``verbose = rank == 0``."""
    for node, _ in nodes:
        if not isinstance(node, ast.Assign):
            continue
        value = ast.unparse(node.value)
        is_flag = value.startswith("True if") or isinstance(node.value, ast.Compare | ast.BoolOp)
        if is_flag and re.search(ON_A_RANK, value, re.I):
            yield from (re.findall(r"\w+", ast.unparse(target))[-1] for target in node.targets)


def _nodes(node: ast.AST, words: set[str], above: Above = ()) -> Iterator[tuple[ast.AST, Above]]:
    """Yield each node below this one, with what it stands in, but no function without a word."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, DEFINITIONS) or child.name in words or _is_special(child, node):
            yield child, (*above, node)
            yield from _nodes(child, words, () if isinstance(child, SCOPES) else (*above, node))


def _calls(code: Code) -> Iterator[tuple[ast.Call, str, Above]]:
    for node, above in code.nodes:
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func), above


def _conditions(node: ast.AST, above: Above) -> list[tuple[str, bool]]:
    """Return the conditions under which a node is reached, and whether each must not hold."""
    pairs = pairwise((*above, node))
    found = [(one.test, inner in one.orelse) for one, inner in pairs if isinstance(one, ast.If)]
    return [(ast.unparse(test), is_else) for test, is_else in found]


def _left_before(node: ast.AST, above: Above) -> Iterator[tuple[str, bool]]:
    """Yield the conditions under which lines before a node leave its function or loop."""
    for one, inner in pairwise((*above, node)):
        body = getattr(one, "body", [])
        for at in range(body.index(inner) if isinstance(body, list) and inner in body else 0):
            if isinstance(body[at], ast.If) and isinstance(body[at].body[-1], LEAVES):
                test = ast.unparse(body[at].test)
                yield from [(test, True)] if " and " not in test else ()


def choices(code: Code) -> Found:
    """Find where a result decides, as on the best checkpoint or on an end of the training."""
    for node, above in code.nodes:
        is_order = isinstance(node, ast.Compare) and isinstance(node.ops[0], ORDERS)
        test = ast.unparse(node) if is_order else ""
        if DECIDES.search(test):
            yield "decides", node, {}
        is_choice = OF_A_SHARE.match(test) and re.search("save|best", ast.unparse(above[-1]))
        what = ast.unparse(node) if is_choice or isinstance(node, ast.Call) else ""
        value = what if is_choice else "".join(STEPS_BY.findall(what))
        is_of_training = value and not re.search("val|test|dev(?!ice)", value)
        if is_of_training and not _is_agreed(_names(value), code.text):
            facts = {} if "train" in value else {"guessed": "evaluation"}
            yield "chooses by a share", node, facts | {"what": what}


def stops(code: Code) -> Found:
    """Find where a rank leaves the training, or a batch, by what it alone knows."""
    for node, above in code.nodes:
        if isinstance(node, ast.ExceptHandler) and OUT_OF_MEMORY.search(ast.unparse(node)):
            goes_on = any(isinstance(part, ast.Continue) for part in ast.walk(node))
            if goes_on or TRAINS.search(ast.unparse(above[-1])):
                yield "leaves a batch out", node, {"level": "NOTE"}
        is_exit = isinstance(node, ast.Call) and EXITS.fullmatch(ast.unparse(node.func))
        if not is_exit and not isinstance(node, ast.Break | ast.Return | ast.Continue | ast.Raise):
            continue
        loops = [(at, one) for at, one in enumerate(above) if isinstance(one, ast.For | ast.While)]
        at, outer = loops[-1] if loops else (0, cast(Any, above[0]))
        is_step = isinstance(node, ast.Return) and not loops and isinstance(outer, DEFINITIONS)
        goes_on = is_step or isinstance(node, ast.Continue)  # with the next batch
        body = outer.body if loops or is_step else []
        words = BACKWARD if is_step else TRAINS
        trains = [one.lineno for one in body if words.search(ast.unparse(one))]
        if not trains or (goes_on and trains[-1] <= getattr(node, "lineno", 0)):
            continue  # nothing is trained after it
        for test, _ in _conditions(node, above[at:]):
            names = _names(test)
            is_agreed = _is_agreed(names, code.text)
            is_own = bool(OWN_LOSS.search(test) or (goes_on and OWN_BATCH.search(test)))
            is_own = is_own and not OF_EVALUATION.search(test) and not is_agreed
            is_own = is_own and getattr(above[0], "name", "") not in code.alone
            is_alone = code.on_a_rank.search(test) or _is_set_alone(names, code, above[0])
            leaves = not isinstance(node, ast.Raise)
            if is_own and goes_on:
                yield "leaves a batch out", node, {}
            elif is_own or (is_alone and leaves):
                ends = is_exit or isinstance(node, ast.Raise)
                what = f"a rank leaves the training by itself, if {test}: the others wait "
                what += "until a launcher ends them" if ends else "for ever"
                facts = {"what": what, "level": "NOTE" if ends else "WARN"}
                yield "a rank stops alone", node, facts


def _names(test: str) -> set[str]:
    """Return the variables of a condition."""
    return {*re.findall(r"[A-Za-z_]\w*\b(?!\()", test)} - {"np", "torch", "math", "self", "args"}


def _is_agreed(names: set[str], text: str) -> bool:
    """Whether a variable was combined from all ranks: it was assigned so, or combined in place."""
    ways = rf"\b{{0}}\b.*=.*{AGREES}|^[^=\n]*{AGREES}\w*\([^=\n]*\b{{0}}\b"
    return any(re.search(ways.format(name), text, re.M) for name in names)


def _is_set_alone(names: set[str], code: Code, scope: ast.AST) -> bool:
    """Whether one rank alone changes a variable by which the training stops early."""
    names = {name for name in names if re.search("stop|patience|count|wait", name, re.I)}
    for node, above in code.nodes if names else ():
        targets = [node.target] if isinstance(node, ast.AugAssign) else getattr(node, "targets", [])
        changed = [ast.unparse(target) for target in targets]
        changed += [ast.unparse(node.func)] if isinstance(node, ast.Call) else []
        words = {*re.findall(r"\w+", " ".join(changed))}
        is_on_a_rank = any(code.on_a_rank.search(test) for test, _ in _conditions(node, above))
        if above[0] is scope and names & words and is_on_a_rank:
            return not _is_agreed(names, code.text)
    return False


def averages(code: Code) -> Found:
    """Find where results are combined, and divided by the number of ranks then. It may be right."""
    combined = defaultdict(list)  # calls of collectives, by what they combine and the function
    for call, name, above in _calls(code):
        if COLLECTIVE.fullmatch(name) and call.args:
            combined[ast.unparse(call.args[0]), above[0]].append(call)
    for node, above in code.nodes:
        if not isinstance(node, ast.Assign | ast.AugAssign | ast.Return | ast.Expr):
            continue
        text = ast.unparse(node)
        is_divided = BY_RANKS.search(text)
        for (what, scope), calls in combined.items():
            is_mean = is_divided or ("mean(" in text and "gather" in ast.unparse(calls[0].func))
            if is_mean and scope is above[0] and re.search(rf"(?<![\w.]){re.escape(what)}\b", text):
                yield from (("averages", one, {}) for one in calls if one.lineno <= node.lineno)
        if BY_HELPER.search(text):
            yield "averages", node, {}


def _is_of_rank_0(node: ast.AST, above: Above, code: Code) -> bool:
    conditions = (*_conditions(node, above), *_left_before(node, above))
    tests = [(test, is_else) for test, is_else in conditions if code.on_a_rank.search(test)]
    is_alone = getattr(above[0], "name", "") in code.alone
    return is_alone or any(bool(OF_OTHERS.search(test)) == is_else for test, is_else in tests)


def loads(code: Code) -> Found:
    """Find calls of torch.load that do not say where the tensors go."""
    for call, name, above in _calls(code) if LOADS_MODEL.search(code.text) else ():
        is_mapped = len(call.args) > 1 or "map_location" in ast.unparse(call)
        is_mapped = is_mapped and "map_location='cuda:0'" not in ast.unparse(call)
        if name != "torch.load" or is_mapped or not call.args:
            continue
        # Where there are no ranks, or no GPU for each, or where rank 0 alone loads, or arrays.
        is_array = ast.unparse(above[-1]).startswith(("np.", "numpy."))
        is_right = is_array or _is_of_rank_0(call, above, code)
        is_right = is_right or any(
            re.search("cuda|gpu|device", test)
            or ("distributed" in test and is_else != test.startswith("not "))
            for test, is_else in _conditions(call, above)
        )
        path = ast.unparse(call.args[0])
        is_own = "rank" in path or re.search(rf"\b{re.escape(path)} = .*rank", code.text)
        if not is_right and not is_own:
            yield "loads onto one GPU", call, {}


def resumes(code: Code) -> Found:
    """Find states of optimizers that one rank alone loads. DDP sends the others weights alone."""
    for call, name, above in _calls(code):
        if re.search(r"opt\w*\.load_state_dict$", name) and _is_of_rank_0(call, above, code):
            yield "resumes on one rank", call, {}


def samplers(code: Code) -> Found:
    """Find samplers whose epoch no file of the project sets, and shares that none combines."""
    for node, above in code.nodes:  # it may be named first, and called later
        is_class = isinstance(node, ast.Name | ast.Attribute) and not isinstance(above[-1], SCOPES)
        if not is_class or not ast.unparse(node).endswith("DistributedSampler"):
            continue
        statement = next((one for one in above[::-1] if isinstance(one, ast.stmt)), node)
        call = above[-1] if isinstance(above[-1], ast.Call) else node
        if "isinstance(" in ast.unparse(statement):
            continue
        if re.search(r"\brank=.*local_?rank", ast.unparse(call), re.I):
            what = "a local rank chooses the share, so all hosts have the same ones"
            yield "equal shares", call, {"what": what, "level": "NOTE"}
        is_named = isinstance(statement, ast.Assign)
        target = ast.unparse(statement).partition("=")[0] if is_named else ""
        if OF_EVALUATION.search(target):
            if not COMBINES.search(code.whole):
                what = "each rank evaluates its own share, and no line combines results"
                yield "evaluates a share", call, {"what": what, "guessed": "evaluation"}
        elif "shuffle=False" not in ast.unparse(call) and ".set_epoch(" not in code.whole:
            what = "set_epoch is called nowhere, so each epoch has the same order"
            yield "no set_epoch", call, {"what": what, "guessed": "training"}


def downloads(code: Code) -> Found:
    """Find downloads of all ranks at once, into one folder. A run that makes them says so."""
    for call, name, above in _calls(code):
        asks = "download=True" in map(ast.unparse, call.keywords) or DOWNLOADS.fullmatch(name)
        if asks and not _is_of_rank_0(call, above, code) and not FIRST.search(code.whole):
            facts = {"ranks": "that come here", "name": name, "level": "NOTE", "read": True}
            yield "every rank downloads", call, facts


def batches(code: Code) -> Found:
    """Find loaders of shares whose batch is as large as that of all ranks."""
    texts = [ast.unparse(node) for node, _ in code.nodes if isinstance(node, ast.AugAssign)]
    grown = {text.partition(" ")[0]: text.replace("*=", "*") for text in texts if "*=" in text}
    for call, name, _ in _calls(code):
        passed = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        size = passed.get("batch_size", "")
        what = grown.get(size, size)
        if "Loader" in name and "sampler" in passed and TIMES_RANKS.search(what):
            yield "batch of all ranks", call, {"what": what}


def handles(code: Code) -> Found:
    """Find collectives that return at once, where nothing waits for any."""
    for call, name, _ in _calls(code) if not WAITS.search(code.whole) else ():
        if COLLECTIVE.fullmatch(name) and "async_op=True" in map(ast.unparse, call.keywords):
            yield "not waited for", call, {"what": name}


def schedules(code: Code) -> Found:
    """Find numbers of steps that are computed from a data set of which a rank has a share."""
    for node, _ in code.nodes if "DistributedSampler" in code.whole else ():
        text = ast.unparse(node) if isinstance(node, ast.Assign | ast.Expr) else ""
        found = STEPS.search(text)
        if not found or not SCHEDULES.search(text) or re.search(RANKS, text, re.I):
            continue
        divided = [each[1] for each in DIVIDED.finditer(code.whole)]
        if not divided or found[3] in divided:  # else this is the batch of all ranks
            yield "steps of all ranks", node, {"what": found[0]}


def seeds(code: Code) -> Found:
    """Find seeds that are equal on all ranks. A run that makes a step says what is drawn then."""
    for call, name, above in _calls(code):
        if name != "torch.manual_seed" or OWN_SEED.search(code.whole):
            continue
        if "spawn(" not in ast.unparse(above[0]):  # else the ranks do not know this seed
            facts = {"ranks": "that come here", "where": "after this seed", "name": "torch"}
            yield "equal random numbers", call, facts | {"guessed": "step", "optional": True}


RULES = (
    choices,
    stops,
    averages,
    loads,
    resumes,
    samplers,
    downloads,
    batches,
    handles,
    schedules,
    seeds,
)
