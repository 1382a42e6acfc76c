#!/usr/bin/env python3
"""make mutate: breaks mha.h a little, many times, and sees whether the tests notice.

A mutant is mha.h with one small change in the code of its implementation that is compiled here:
< for <=, == for !=, + for -, && for ||, a constant one off, another index, a statement dropped, a
condition negated. Each is built and run against the tests until one fails: it is killed, also by a
crash or a hang. One that does not compile, or does what mha.h does, does not count: its object code
is the same, or it survives and is in EQUIVALENT. The exit status is 0 if at least 95 % are killed.

    python3 tests/mutate.py [-n MUTANTS] [--seed SEED] [-j JOBS] [--quick] [--lines FIRST-LAST]

Which mutants there are follows from mha.h and the seed; verdicts are kept in build/mutate, so a
run that was stopped goes on where it was, and survivors are tried again when a test has changed.
--quick: without the tests that take long. --lines: of those lines only."""

import argparse, concurrent.futures, hashlib, json, os, random, re, resource
import shutil, subprocess, sys, threading, time

# Survivors that give the results of mha.h: (a pattern of "function: statement", up to the end of the
# line, a pattern of the mutated line, why).
EQUIVALENT = [
    ("MHA__COND_INIT", ";", "with glibc a condition of zeros, which memset makes, is a good one"),
    ("MHA__MUTEX_INIT", ";", "with glibc a mutex of zeros, which memset makes, is a good one"),
    ("MHA__COND_FREE", ";", "with glibc there is nothing to give back"),
    ("MHA__MUTEX_FREE", ";", "with glibc there is nothing to give back"),
    (r"^mha__(project_wanted|want\w*|fetch\w*|ahead):|MHA__PREFETCH|MHA__CACHED|job->ahead|"
     r"mha__want\w*\(|wanted\.(n|at|each|step)", "",
     "asks for memory ahead of its use: speed only"),
    (r"alone && !lazy && !job->local && job->tiles == 1", "", "two ways to the same bits"),
    (r"^mha__narrow_avx2: did = np >= 4", "did = p >= 4", "two ways to the same bits"),
    (r"^mha__weights_unit: .*j0 < job->keys", "j0 <= job->keys", "a block of no keys writes nothing"),
    (r"^mha__scores: ranges = ", "softcap == 1", "two ways to the same bits"),
    (r"^mha__attend_tiles: block.compact = .*narrow_tiles", "rows < ", "two ways to the same bits"),
    (r"^mha__scores: .*first < np", "first <= np", "of no panels, nothing is left"),
    (r"^mha__scores: .*seen = any = 1", "any = 2", "that it is not 0 is all that counts"),
    (r"^mha__scores: .*mha__max\(all_hi - lo, 0\)", "all_hi - lo, 1", "a sixteenth of it is 0 as well"),
    (r"^mha__store: .*memset\(p \+ j", r"\+ m, 1,", "any number will do where there is no key"),
    (r"^mha__store: .*at\[i\] \+= step", "i <= m", "reads past mha__zeros: the sanitizers see it"),
    (r"block.k_rows \|\| block.compact\) && \(to < hi \|\|", "", "only for what is asked ahead"),
    (r"pool->turns \+ 1", "pool->turns - 1", "that it changes is all that counts"),
    ("^mha__project_unit: continue;", "", "the same bits are computed and stored once more"),
    (r"0x7e00u|0x7fc00000u", "0x7e01u|0x7fc00001u", "any NaN will do"),
    (r"a < 0x33000000u\)", "0x33000001u", "2^-25 is rounded to even below, to 0 as well"),
    (r"u->i0 = i0;", "", "it is not read"),
    (r"plan->stage_v = .* : 0\);$", r" : 1\);$", "a cache line of workspace that is not used"),
    (r"if \(batch == 0 \|\| seq == 0\) return MHA_OK;", r"batch == 0 \|\| batch == 0",
     "the loops below are over nothing"),
    (r"mha__cache_part\(to, part\) == 0\) continue;", "== 1", "nothing is copied then anyway"),
    (r"for \(i = 0; i < tiles; i\+\+\)", "i (< rows|<= tiles)", "past the last tile no row is left to pack"),
    (r"^mha__project_unit: int narrow = ", "<= INT_MAX", "of 33,554,431 inputs, which are in no test"),
    (r"^mha__project_unit: .*MHA__NEAR", ">= MHA__NEAR", "two ways to the same bits"),
    (r"^mha__project_unit: const float \*begun = ", "k0 - k", "k is less than k0, if that is not 0"),
    (r"^mha__project_unit: const float \*w = ", r"compact \? 1", "it is not read then"),
    (r"^mha__store: for \(n = 1; i \+ n < m && row", r"i \+ m < m", "two ways to the same bits"),
    (r"^mha__tile_good: for \(c = 0; c < rest", "c <= rest", "what fills a panel up is 0, or as bad as "
     "the rest"),
    (r"bits\[j\] = 0;", r"bits\[j\] = 1;", "1 is as finite as 0"),
    (r"n = mha__floats\(c->rope.width", "", "less than the scratch that attention has anyway"),
    ("^mha__cpu_has:", "", "this CPU has all that is asked for"),
    (r"to->cfg.ring != from->cfg.ring \|\| \(to->cfg.ring && ", r"\(from->cfg.ring && ",
     "they are equal here"),
    (r"mha__fail\(.*, 0\);$", r"\b1(, 0)?\);$", "a number that the sentence has no place for"),
    (r"mha__why_make\(NULL, 0\)", r"NULL, 1\)", "no sentence is asked for, of whatever size"),
    (r"^mha__weights_unit: .*from = 0;", "from = 1;", "it is not read until mha__scores has set it"),
    (r"b = \(r0 \+ from\) / job->seq;", "", "it is counted up from there"),
    (r"plan->lane = 0;", "= 1;", "it is rounded up to cache lines"),
    (r"mha__check_workspace\(why, NULL, 0, plan->total\)", "NULL, 1,", "1 is not enough either"),
    (r"^mha__sdpa_resolve: mha__plan_attend\(", r"^\s*1\);$", "less than the scratch that attention has anyway"),
    (r"^mha__cap_avx512:.*30\.0f", r"31\.0f", "both are 1 after the division"),
    (r"mha__narrow_rows_avx512\(4, .*c \+ i", r"c - i", "i is 0: no tile has eight rows"),
    (r"^mha__make_qkv: if \(q\)$", r"if \(k\)", "a place at null is none"),
    (r"job\.v_rows = ", r"r\.d_k &&", "two ways to the same bits"),
    (r"scale \? scale\[j\] : 0\.0f", r": 1\.0f", "only INT8 reads it"),
    (r"a >= 0x38800000u", "0x38800001u", "2^-14 is the same both ways"),
    (r"top = la > lb", "la >= lb", "they are equal then"),
    (r"^mha__project_unit: .*tiles >= 2", "", "asks for memory ahead of its use: speed only"),
    (r"^mha__project: job.row_block = mha__div_up", "", "rows are cut elsewhere: the same bits"),
    (r"^mha__pool_for: mha__pool_spin", ";", "it waits by other means"),
    (r"^mha__pool_spin: MHA__LOCK", ";", "a race: TSan sees it"),
    (r"^mha__cpus: .*n < 4096", r": 2;", "nobody can make sysconf fail"),
    (r"^mha__keep: float scale = 0", r"= 1\.0f", "only INT8 reads it"),
    (r"^mha__to_int8: float q = scale > 0", ">= 0", "0 / 0 becomes INT_MIN here, and that 0"),
    (r"^mha__products: mha__place room", "k_room, 2", "of one head, the next is not asked for"),
    (r"mha__sdpa_resolve\(&w, args, &r, &d, &plan, 1\)|mha__check_tensor\(.*, 1, batch",
     r", 2[,)]", "that it is not 0 is all that counts"),
    (r"j < MHA__NR && c \+ n \* MHA__NR \+ j < d", "i < MHA__NR",
     "what is written past a panel is overwritten by the next, and ends with d"),
    (r"^mha__products: left = ", ";", "asks for memory ahead of its use: speed only"),
    (r"^mha__attend_scratch: mha__take\(&bytes, mha__floats\(kern->mr, MHA__KEYS", "MHA__KEYS, 2",
     "more scratch than is used"),
    (r"^mha__attend_scratch: size_t bytes = 0", "= 1;", "it is rounded up to cache lines, or down to floats"),
    (r"^mha__scores: int i, np, any = 0", "any = 1", "a row that sees no key has no weights either way"),
    (r"^mha__cap: .*float t = mha__float", "0x7ffffffeu", "the last bit of a score, less than its rounding"),
    (r"^mha__dots_rows?_avx2: for \(; k > 0", "k > 1", "k is a multiple of 16"),
    (r"^mha__shape_scalar: if \(how->slope != 0", r"slope != 1\.0f", "0 times a distance adds nothing"),
    (r"^mha__project_unit: ptrdiff_t end = ", r"last \+ base", "what other units do too, with the same bits"),
    (r"^mha__extra: memset\(p, 0", "p, 1,", "without weights it is not read"),
    (r"^mha__attend_local_unit: if \(lo < hi\)", "lo <= hi", "of no keys nothing is packed"),
]

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OUT = os.path.join(ROOT, "build", "mutate")
CC = (os.environ.get("CC") or "cc").split()
# MHA__SANITIZED: nothing is inlined or unrolled by force, so that compiling takes half the time.
FLAGS = ["-std=c99", "-O1", "-w", "-DMHA__SANITIZED", "-Itests/standin"]
LEAST = 95

# Suites and how many randomised cases: what is fast or finds much comes first.
QUICK = [("errors_suite", 1), ("golden_suite", 1), ("random_suite", 60), ("cache_suite", 1),
         ("stages_suite", 1), ("compact_suite", 1), ("memory_suite", 1), ("edges_suite", 1),
         ("props_suite", 1), ("threads_suite", 1), ("shape_suite", 1)]
# What make test does besides. test_kernels.c has an implementation of its own: it is built again.
SLOW = [("kernels_suite", 100), ("random_suite", 2000), ("compact_suite", 2000),
        ("kernels_suite", 2000)]


# ---- mutations --------------------------------------------------------------------------------

def blank(text):
    """text with comments, strings and preprocessor lines as spaces, so that columns stay."""
    rest = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
                      r'|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*', re.S | re.M)
    return rest.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


# Names that are easily mistaken for each other.
NAMES = ["i j", "i p", "p q", "b h", "h g", "t i", "m n", "lo hi", "from to", "k v", "q k", "d_k d_v",
         "heads kv_heads", "seq keys", "qt kt", "qb kb", "cu_q cu_k", "cu_seq cu_source", "row col",
         "top sum", "c i", "t0 t1", "j0 j", "r0 r", "k_stride v_stride", "q_stride o_stride",
         "batch seq", "batch head", "left right", "c_hi t_hi", "c_lo t_lo", "rows tiles", "a b",
         "kn k0", "np p", "r c", "first last", "had more", "low high", "e0 e1", "t0 t1", "h0 h1"]
PAIRS = {}
for pair in NAMES:
    x, y = pair.split()
    PAIRS.setdefault(x, []).append(y)
    PAIRS.setdefault(y, []).append(x)
DECLARATION = re.compile(r"\s*(static|const|int|float|double|ptrdiff_t|size_t|unsigned|char|void|"
                         r"long|signed|uint\w+|__m\w+|mha_\w+|struct|enum|typedef|return|case|else|"
                         r"default|extern|do|while|for|if|switch|MHA__INLINE)\b(?!\()")


def number_changes(word):
    m = re.fullmatch(r"(0[xX][0-9a-fA-F]+|\d+)([uUlL]*)", word)
    if m:
        base = 16 if m.group(1)[:2] in ("0x", "0X") else 10
        n = int(m.group(1), base)
        for other in {0: [1], 1: [0, 2]}.get(n, [n - 1, n + 1]):
            yield (hex(other) if base == 16 else str(other)) + m.group(2)
    m = re.fullmatch(r"(\d+)\.(\d+)(f?)", word)
    if m:
        n = int(m.group(1))
        for other in {0: [1], 1: [0, 2]}.get(n, [n - 1, n + 1]):
            yield "%d.%s%s" % (other, m.group(2), m.group(3))


def mutations(code, before, names):
    """All (column, old, new) of a line of blanked code, in lists, one a kind. before: the code line
    before it; names: what other names its function has."""
    operators, numbers, others, wholes = [], [], [], []
    for m in re.finditer(r"->|<<=?|>>=?|\+\+|--|[<>=!+\-*/%&|^]=|&&|\|\||[<>+\-]", code):
        old, at = m.group(), m.start()
        pair = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||",
                "||": "&&", "+=": "-=", "-=": "+=", "++": "--", "<<": ">>", ">>": "<<"}.get(old)
        if old in "+-" and re.search(r"[\w)\]] $", code[:at]) and code[m.end():m.end() + 1] == " ":
            pair = "-" if old == "+" else "+"
        if pair: operators.append((at, old, pair))
    for m in re.finditer(r"(?<![\w.])(0[xX][0-9a-fA-F]+|\d+(?:\.\d+)?)[uUlLf]*(?![\w.])", code):
        if re.match(r"\s*(const )?\w+ [^=(]*\[$", code[:m.start()]): continue # room for so many
        numbers += [(m.start(), m.group(), new) for new in number_changes(m.group())]
    for m in re.finditer(r"[A-Za-z_]\w*", code):
        others += [(m.start(), m.group(), new) for new in PAIRS.get(m.group(), []) if new in names]
    m = re.search(r"\b(if|while) \(", code)
    if m:
        depth, end = 1, m.end()
        while end < len(code) and depth:
            depth += {"(": 1, ")": -1}.get(code[end], 0)
            end += 1
        if depth == 0:
            old = code[m.end():end - 1]
            wholes.append((m.end(), old, "!(" + old + ")"))
    if (re.fullmatch(r"\s*[^{}]*;\s*", code) and not DECLARATION.match(code) and code.strip() != ";"
            and re.search(r"[;{})]\s*$|\belse\s*$|^\s*$", before)):
        wholes.append((len(code) - len(code.lstrip()), code.strip(), ";"))
    return [kind for kind in (operators, numbers, others, wholes) if kind]


def compiled_lines():
    """Numbers of the lines of mha.h that the preprocessor leaves something of."""
    text = subprocess.run(CC + FLAGS + ["-E", "tests/main.c"], cwd=ROOT, check=True,
                          stdout=subprocess.PIPE, universal_newlines=True).stdout
    lines, mine, number = set(), False, 0
    for line in text.split("\n"):
        m = re.match(r'# (\d+) "(.*?)"', line)
        if m:
            number, mine = int(m.group(1)), m.group(2).endswith("mha.h")
            continue
        if mine and line.strip(): lines.add(number)
        number += 1
    return lines


def candidates(text, seed, first, last):
    """Endless while there are any: (line number, column, old, new), each line once before any twice."""
    lines = blank(text).split("\n")
    begin = next(i for i, s in enumerate(text.split("\n")) if s.startswith("#define MHA__IMPLEMENTED"))
    keep, before, found, names, end = compiled_lines(), "", {}, set(), 0
    for i, code in enumerate(lines):
        if code == "{": # of a function
            end = lines.index("}", i)
            names = set(re.findall(r"[A-Za-z_]\w*", "\n".join(lines[i - 6:end])))
        if begin < i < end and i + 1 in keep and first <= i + 1 <= last:
            some = mutations(code, before, names)
            if some: found[i + 1] = some
        if code.strip(): before = code
    rng = random.Random(seed)
    while found:
        order = sorted(found)
        rng.shuffle(order)
        for number in order:
            kind = rng.choice(found[number])
            yield (number,) + kind.pop(rng.randrange(len(kind)))
            if not kind: found[number].remove(kind)
            if not found[number]: del found[number]


# ---- building and running ---------------------------------------------------------------------

def limits(seconds):
    def set_limits():
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    return set_limits


def run(program, suite, cases, seconds):
    """Whether a suite passes in so many seconds of CPU time."""
    env = dict(os.environ, MHA_TEST_CASES=str(cases), MHA_TEST_SEED="1", MHA_TEST_ISA="")
    try:
        return subprocess.run([program, "-f", "-s", suite], cwd=ROOT, env=env,
                              stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL, timeout=8 * seconds + 60,
                              preexec_fn=limits(seconds)).returncode == 0
    except subprocess.TimeoutExpired:
        return False


class Bench:
    """The objects of the tests, built once, and how long each suite may take."""

    def __init__(self, text):
        self.text = text
        folder = os.path.join(ROOT, "tests")
        files = sorted(s for s in os.listdir(folder) if s.endswith((".c", ".h")))
        digest = hashlib.sha1()
        for s in files:
            with open(os.path.join(folder, s), "rb") as f: digest.update(f.read())
        self.tests = digest.hexdigest()
        self.lock, self.trees, self.made = threading.Lock(), [], 0
        self.others = []
        tree = self.tree()
        for source in ["main.c", "support.c", "oracle.c"] + [s for s in files if re.match(r"test_.*\.c", s)]:
            if not self.compile(tree, source): sys.exit(source + " does not compile")
            if source != "main.c":
                obj = os.path.join(OUT, source[:-2] + ".o")
                os.replace(os.path.join(tree, source[:-2] + ".o"), obj)
                self.others.append(obj)
        with open(os.path.join(tree, "main.o"), "rb") as f: self.plain = f.read()
        program, self.seconds = self.link(tree, ["main"]), {}
        for suite, cases in QUICK:
            used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            if not run(program, suite, cases, 600):
                sys.exit("the tests fail before anything is changed: " + suite)
            used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - used
            self.seconds[suite] = max(self.seconds.get(suite, 0), int(4 * used) + 5)
        self.trees.append(tree)

    def tree(self):
        """A copy of what is compiled: mutants are built side by side, all with the same paths."""
        with self.lock:
            if self.trees: return self.trees.pop()
            self.made += 1
            path = os.path.join(OUT, "tree%d" % self.made)
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(os.path.join(ROOT, "tests"), os.path.join(path, "tests"))
        with open(os.path.join(path, "mha.h"), "w") as f: f.write(self.text)
        return path

    def compile(self, tree, source):
        return subprocess.run(CC + FLAGS + ["-c", "-o", source[:-2] + ".o", "tests/" + source],
                              cwd=tree, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL).returncode == 0

    def link(self, tree, own):
        """The program, with these objects of the tree instead of the common ones."""
        objs = [os.path.join(tree, name + ".o") for name in own]
        objs += [o for o in self.others if os.path.basename(o)[:-2] not in own]
        program = os.path.join(tree, "test")
        subprocess.run(CC + ["-o", program] + objs + ["-lm", "-pthread"], check=True)
        return program

    def verdict(self, tree, mutated, was, quick):
        """Of mha.h with this text: killed, survived, equivalent, or no: it does not compile."""
        with open(os.path.join(tree, "mha.h"), "w") as f: f.write(mutated)
        if not self.compile(tree, "main.c"): return "no"
        with open(os.path.join(tree, "main.o"), "rb") as f:
            if f.read() == self.plain: return "equivalent"
        if was != "survived quick":
            program = self.link(tree, ["main"])
            for suite, cases in QUICK:
                if not run(program, suite, cases, self.seconds[suite]): return "killed by " + suite
        if quick: return "survived quick"
        if not self.compile(tree, "test_kernels.c"): return "no"
        program = self.link(tree, ["main", "test_kernels"])
        for suite, cases in SLOW:
            if not run(program, suite, cases, 600): return "killed by %s %d" % (suite, cases)
        return "survived"


# ---- the report -------------------------------------------------------------------------------

def function_of(lines, number):
    for i in range(number - 1, -1, -1):
        if lines[i] == "{":
            while i > 0 and not re.search(r"\b(mha_\w+)\(", lines[i]): i -= 1
            return re.search(r"\b(mha_\w+)\(", lines[i]).group(1)
    return ""


def explanation(lines, number, new):
    first = number - 1
    while re.search(r"[^;{}:]$", lines[first - 1]) and lines[first - 1].strip(): first -= 1
    statement = " ".join([function_of(lines, number) + ":"] +
                         [line.strip() for line in lines[first:number]])
    for where, what, why in EQUIVALENT:
        if re.search(where, statement) and re.search(what, new): return why
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-n", type=int, default=150, help="how many mutants that count")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-j", type=int, default=1, help="how many at a time")
    parser.add_argument("--quick", action="store_true", help="without what takes long")
    parser.add_argument("--lines", default="1-1000000000", help="FIRST-LAST")
    args = parser.parse_args()
    first, last = (int(x) for x in args.lines.split("-"))
    with open(os.path.join(ROOT, "mha.h")) as f: text = f.read()
    lines = text.split("\n")
    os.makedirs(OUT, exist_ok=True)
    log = os.path.join(OUT, "verdicts")
    known = {}
    if os.path.exists(log):
        with open(log) as f:
            for line in f:
                key, tests, verdict = json.loads(line)
                known[key] = (tests, verdict)
    bench = Bench(text)

    def judge(mutant):
        number, at, old, new = mutant
        line = lines[number - 1]
        changed = line[:at] + new + line[at + len(old):]
        mutated = "\n".join(lines[:number - 1] + [changed] + lines[number:])
        key = hashlib.sha1(mutated.encode()).hexdigest()
        tests, verdict = known.get(key, ("", ""))
        explained = explanation(lines, number, changed) is not None
        if verdict.startswith("survived") and tests != bench.tests and not explained: verdict = ""
        quick = args.quick or explained
        if not verdict or (verdict == "survived quick" and not quick):
            tree = bench.tree()
            verdict = bench.verdict(tree, mutated, verdict, quick)
            bench.trees.append(tree)
            with bench.lock, open(log, "a") as f:
                f.write(json.dumps([key, bench.tests, verdict]) + "\n")
        return number, line, changed, verdict

    count, used = dict.fromkeys(("killed", "survived", "explained", "equivalent", "no"), 0), set()
    def tell(number, line, changed, verdict):
        word = verdict.split()[0]
        why = explanation(lines, number, changed) if word == "survived" else None
        if why: word = "explained"
        count[word] += 1
        if word in ("killed", "survived"): used.add(number)
        if word in ("survived", "explained"):
            print("%s, line %d, %s:" % (word, number, function_of(lines, number)))
            print("- %s\n+ %s" % (line.strip(), changed.strip()))
            if why: print("  because: " + why)
            print(flush=True)

    todo = candidates(text, args.seed, first, last)
    with concurrent.futures.ThreadPoolExecutor(args.j) as pool:
        running = []
        while count["killed"] + count["survived"] < args.n:
            while len(running) < args.j:
                mutant = next(todo, None)
                if not mutant: break
                running.append(pool.submit(judge, mutant))
            if not running: break
            tell(*running.pop(0).result())
        for r in running: r.cancel()

    total = count["killed"] + count["survived"]
    if not total: sys.exit("there is nothing to mutate")
    percent = 100.0 * count["killed"] / total
    print("seed %d: %d mutants of %d lines, %d killed (%.1f %%), %d survived; not counted: %d with the "
          "same object code, %d explained above, %d that do not compile"
          % (args.seed, total, len(used), count["killed"], percent, count["survived"],
             count["equivalent"], count["explained"], count["no"]))
    sys.exit(percent < LEAST)


if __name__ == "__main__":
    main()
