#!/usr/bin/env python3
"""mha.h against what else one could use: make bench-peers BENCH_ARGS="--help"

Ours (mha_shared.c), a hand-written layer on OpenBLAS (openblas_layer.c), ONNX Runtime's fused
attention operators and PyTorch, on the same numbers. For each row, part and number of threads:

  1. every output is compared with a reference in float64; who is wrong is reported and left out;
  2. all take turns: a turn is a few calls, and before the next one begins, the threads of the
     last one have gone to sleep;
  3. best and median of all calls are kept. Ratios are of the best: best peer / ours.

The C implementations are timed in C. ONNX Runtime (inputs and outputs bound once) and PyTorch
are timed around the call from Python, which is part of what they cost there; what an empty call
takes is printed, because in the row `tiny` it counts. Where a library has several ways to do a
row, the fastest that gives the right answer is taken.

layer = QKV projection + attention + W_O.  core = attention on given q, k, v.
Decode: 1 new token after 1024 cached ones; hot = the same call again and again, cold = other
memory is read before each call until the caches hold nothing of ours.
"""

import argparse
import collections
import ctypes
import gc
import math
import os
import pathlib
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import time

# The threads of the OpenBLAS layer are OpenMP's: without this, OpenBLAS (and the one inside
# NumPy) would start more.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

try:
    import numpy as np
except ImportError as error:
    sys.exit(f"bench-peers needs NumPy: {error}")

HERE = pathlib.Path(__file__).resolve().parent
TOP = HERE.parent.parent
WRONG = 1e-4          # relative to max|y|; float32 done right is below 1e-5
SWEEP_BYTES = 96 << 20
CACHED = 1024         # tokens in the cache before the one that is decoded

Row = collections.namedtuple("Row", "name B T D H G causal bias past")

ROWS = [
    Row("tiny", 1, 16, 64, 4, 4, 0, 1, -1),
    Row("encoder-small", 1, 128, 384, 12, 12, 0, 1, -1),
    Row("bert-base", 8, 128, 768, 12, 12, 0, 1, -1),
    Row("base-paper", 32, 64, 512, 8, 8, 0, 1, -1),
    Row("gpt2-prefill", 1, 1024, 768, 12, 12, 1, 1, -1),
    Row("llama-gqa", 1, 512, 2048, 32, 8, 1, 0, -1),
    Row("long-causal", 1, 4096, 512, 8, 8, 1, 1, -1),
    Row("long-full", 1, 4096, 512, 8, 8, 0, 1, -1),
    Row("decode-768", 1, 1, 768, 12, 12, 1, 1, CACHED),
    Row("decode-gqa2048", 1, 1, 2048, 32, 8, 1, 0, CACHED),
]


class Skip(Exception):
    """Why something is left out."""


def progress(text):
    """A line that the next one replaces, for people who wait."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- the problems

class Problem:
    """The numbers of one row, and its answers in float64.

    B batch, T queries, S keys, D model width, H heads, G key/value heads, d head width.
    Layer: x [B,S,D], of which the last T are queries; w_qkv [D,(H+2G)d], w_out [D,D].
    Core: q [B,H,T,d], k and v [B,G,S,d]."""

    def __init__(self, row):
        rng = np.random.default_rng(1)

        def normal(*shape, scale=1.0):
            return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)

        self.row = row
        self.d = d = row.D // row.H
        self.S = S = row.T + max(row.past, 0)
        self.N = N = (row.H + 2 * row.G) * d
        self.x = normal(row.B, S, row.D)
        self.x_new = np.ascontiguousarray(self.x[:, S - row.T:])
        self.w_qkv = normal(row.D, N, scale=row.D ** -0.5)
        self.w_out = normal(row.D, row.D, scale=row.D ** -0.5)
        self.b_qkv = normal(N, scale=0.5) if row.bias else None
        self.b_out = normal(row.D, scale=0.5) if row.bias else None
        self.q = normal(row.B, row.H, row.T, d)
        self.k = normal(row.B, row.G, S, d)
        self.v = normal(row.B, row.G, S, d)
        self._reference = {}

    def tokens_first(self, x):
        """[B,H,T,d] -> [B,T,H*d]"""
        return np.ascontiguousarray(x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1))

    def project_qkv(self):
        """q [B,H,T,d], k and v [B,G,S,d] of the layer, in float64."""
        row, d = self.row, self.d
        qkv = self.x.astype(np.float64) @ self.w_qkv.astype(np.float64)
        if row.bias:
            qkv += self.b_qkv
        heads = qkv.reshape(row.B, self.S, row.H + 2 * row.G, d).transpose(0, 2, 1, 3)
        return (heads[:, :row.H, self.S - row.T:], heads[:, row.H:row.H + row.G],
                heads[:, row.H + row.G:])

    def attend(self, q, k, v):
        row, out = self.row, np.empty(q.shape)
        group, last = row.H // row.G, self.S - row.T
        for b in range(row.B):
            for h in range(row.H):
                for i in range(0, row.T, 512):
                    rows = q[b, h, i:i + 512]
                    s = rows @ k[b, h // group].T / math.sqrt(self.d)
                    if row.causal:
                        at = np.arange(i, i + len(rows))[:, None] + last
                        s[np.arange(self.S)[None, :] > at] = -np.inf
                    p = np.exp(s - s.max(axis=1, keepdims=True))
                    out[b, h, i:i + 512] = p @ v[b, h // group] / p.sum(axis=1, keepdims=True)
        return out

    def reference(self, part):
        """layer: y [B,T,D]; core: o [B,H,T,d]."""
        if part not in self._reference:
            if part == "core":
                y = self.attend(*(a.astype(np.float64) for a in (self.q, self.k, self.v)))
            else:
                o = self.attend(*self.project_qkv())
                y = self.tokens_first(o) @ self.w_out.astype(np.float64)
                if self.row.bias:
                    y += self.b_out
            self._reference[part] = y
        return self._reference[part]

    def error(self, part, y):
        want = self.reference(part)
        if y.shape != want.shape:
            return math.inf
        error = np.abs(y - want).max() / np.abs(want).max()
        return float(error) if error == error else math.inf


# ---------------------------------------------------------------- calls that can be timed

class Call:
    """One way to compute one cell. run(n, sweep) makes n calls and returns their seconds;
    sweep is null, or a C function to call before each. output() is the last result."""

    how = ""

    def run(self, n, sweep):
        clock, call, seconds = time.perf_counter_ns, self.call, []
        for _ in range(n):
            if sweep:
                sweep()
            start = clock()
            call()
            seconds.append((clock() - start) * 1e-9)
        return seconds

    def close(self):
        pass


def pointer(array):
    return None if array is None else ctypes.c_void_p(array.ctypes.data)


def compiled(name, source, flags):
    """Compile one of the C files here into a shared object and load it."""
    build = TOP / "build" / "peers"
    build.mkdir(parents=True, exist_ok=True)
    out = build / name
    cc = shlex.split(os.environ.get("CC") or "cc")
    done = subprocess.run([*cc, "-shared", "-fPIC", "-o", out, HERE / source, *flags],
                          capture_output=True, text=True)
    if done.returncode != 0:
        first = [line for line in done.stderr.splitlines() if "error" in line] or ["?"]
        raise Skip(f"{' '.join(cc)} {source}: {first[0].strip()}")
    return ctypes.CDLL(str(out))


class Ours:
    name = "mha.h"

    def __init__(self, isa):
        flags = ["-O2", "-lm", "-pthread"]
        self.lib = lib = compiled("mha.so", "mha_shared.c", flags)
        lib.ours_create.restype = ctypes.c_void_p
        lib.ours_sweep.restype = None
        for f in ("ours_version", "ours_best_isa", "ours_why"):
            getattr(lib, f).restype = ctypes.c_char_p
        lib.ours_sweep_init.argtypes = [ctypes.c_size_t, ctypes.c_int]
        self.isa = lib.ours_isa(isa.encode())
        if self.isa < 0:
            sys.exit(f"--isa {isa}: not an instruction set of mha.h on this CPU")
        name = lib.ours_best_isa().decode() if isa == "auto" else isa
        self.version = f"mha.h {lib.ours_version().decode()}, {name}, cc -O2"

    def calls(self, p, part, threads):
        return [lambda: OursCall(self, p, part, threads)]


class OursCall(Call):
    def __init__(self, ours, p, part, threads):
        r, self.lib, self.p = p.row, ours.lib, p
        self.me = ctypes.c_void_p(self.lib.ours_create(threads))
        if part == "layer":
            self.y = np.full(p.x_new.shape, np.nan, np.float32)
            bad = self.lib.ours_layer(
                self.me, ours.isa, r.D, r.H, r.G, p.d, pointer(p.w_qkv), pointer(p.w_out),
                pointer(p.b_qkv), pointer(p.b_out), r.B, r.T, r.causal, r.past, pointer(p.x),
                pointer(p.x_new), pointer(self.y))
        else:
            self.y = np.full(p.q.shape, np.nan, np.float32)
            bad = self.lib.ours_core(
                self.me, ours.isa, r.B, r.H, r.G, r.T, p.S, p.d, r.causal, pointer(p.q),
                pointer(p.k), pointer(p.v), pointer(self.y))
        self.check(bad)

    def check(self, bad):
        if bad:
            raise Skip(self.lib.ours_why(self.me).decode())

    def run(self, n, sweep):
        seconds = np.zeros(n)
        self.check(self.lib.ours_run(self.me, n, sweep, pointer(seconds)))
        return seconds.tolist()

    def output(self):
        return self.y

    def close(self):
        self.lib.ours_free(self.me)


class OpenBLAS:
    name = "OpenBLAS"

    def __init__(self):
        flags = ["-O3", "-march=native", "-fopenmp"]
        if platform.machine() in ("x86_64", "AMD64"):
            flags.append("-mprefer-vector-width=512")  # where there is AVX-512, use all of it
        self.lib = lib = compiled("openblas.so", "openblas_layer.c", flags + openblas_flags())
        lib.ob_create.restype = ctypes.c_void_p
        lib.ob_version.restype = ctypes.c_char_p
        self.version = " ".join(lib.ob_version().decode().split())

    def calls(self, p, part, threads):
        return [lambda: OpenBLASCall(self.lib, p, part, threads)]


class OpenBLASCall(Call):
    def __init__(self, lib, p, part, threads):
        self.lib, self.p, self.part, self.threads, self.me = lib, p, part, threads, None
        r = p.row
        if part == "layer":
            self.y = np.full(p.x_new.shape, np.nan, np.float32)
            self.me = ctypes.c_void_p(lib.ob_create(
                r.D, r.H, r.G, p.d, pointer(p.w_qkv), pointer(p.w_out), pointer(p.b_qkv),
                pointer(p.b_out), r.B * p.S, p.S, p.S if r.past >= 0 else 0, threads))
            if not self.me:
                raise Skip("out of memory")
            if r.past > 0:
                y, seconds = np.zeros((r.past, r.D), np.float32), np.zeros(1)
                lib.ob_layer_run(self.me, 1, r.past, 1, 0, pointer(p.x), pointer(y), 1, None,
                                 pointer(seconds))
        else:
            self.y = np.full(p.q.shape, np.nan, np.float32)
            self.scores = np.zeros(threads * 128 * p.S, np.float32)

    def run(self, n, sweep):
        r, p, seconds = self.p.row, self.p, np.zeros(n)
        if self.part == "layer":
            self.lib.ob_layer_run(self.me, r.B, r.T, r.causal, r.past, pointer(p.x_new),
                                  pointer(self.y), n, sweep, pointer(seconds))
        else:
            self.lib.ob_core_run(r.B, r.H, r.G, r.T, p.S, p.d, r.causal, pointer(p.q),
                                 pointer(p.k), pointer(p.v), pointer(self.y),
                                 pointer(self.scores), self.threads, n, sweep, pointer(seconds))
        return seconds.tolist()

    def output(self):
        return self.y

    def close(self):
        self.lib.ob_free(self.me)


def openblas_flags():
    """How to compile and link with OpenBLAS."""
    if shutil.which("pkg-config"):
        done = subprocess.run(["pkg-config", "--cflags", "--libs", "openblas"],
                              capture_output=True, text=True)
        if done.returncode == 0:
            return shlex.split(done.stdout) + ["-lm"]
    return ["-lopenblas", "-lm"]


# ---------------------------------------------------------------- ONNX Runtime

class ONNXRuntime:
    name = "ORT"

    def __init__(self):
        try:
            import onnx
            import onnxruntime
        except ImportError as error:
            raise Skip(str(error)) from None
        self.onnx, self.ort = onnx, onnxruntime
        self.version = f"ONNX Runtime {onnxruntime.__version__}"
        onnxruntime.set_default_logger_severity(4)

    def calls(self, p, part, threads):
        """Every operator that can do the row. In these graphs the name of a tensor is its role;
        tensors in `given` are bound as inputs, weights are constants that ORT prepacks."""
        r = p.row
        ways = []
        if part == "layer":
            if r.past < 0 and r.H == r.G:
                ways += [self.layer_attention, self.layer_mha]
            if r.causal:
                ways += [self.layer_gqa]
        else:
            if r.H == r.G and (r.past < 0 or r.T == 1):
                ways += [self.core_mha, self.core_mha_heads_first]
            if r.causal:
                ways += [self.core_gqa]
            ways += [self.core_onnx]
        calls = [lambda way=way: way(p, threads) for way in ways]
        if part == "layer" and r.T == 1:  # one row: packed weights are not always the faster ones
            calls += [lambda way=way: way(p, threads, prepack=False) for way in ways]
        return calls

    def node(self, op, inputs, outputs, domain="com.microsoft", **attributes):
        return self.onnx.helper.make_node(op, inputs, outputs, domain=domain, **attributes)

    def projections(self, p):
        """x -> qkv before, merged -> y after, and their constants."""
        r = p.row
        constants = {"w_qkv": p.w_qkv, "w_out": p.w_out}
        before = [self.node("MatMul", ["x", "w_qkv"], ["qkv" if not r.bias else "qkv_"], "")]
        after = [self.node("MatMul", ["merged", "w_out"], ["y" if not r.bias else "y_"], "")]
        if r.bias:
            constants.update(b_qkv=p.b_qkv, b_out=p.b_out)
            before.append(self.node("Add", ["qkv_", "b_qkv"], ["qkv"], ""))
            after.append(self.node("Add", ["y_", "b_out"], ["y"], ""))
        return before, after, constants

    def split(self, p):
        constants = {"sizes": np.array([p.row.H * p.d, p.row.G * p.d, p.row.G * p.d], np.int64)}
        return [self.node("Split", ["qkv", "sizes"], ["q", "k", "v"], "", axis=-1)], constants

    def layer_attention(self, p, threads):
        r = p.row
        before, after, constants = self.projections(p)
        inputs = ["x", "w_qkv"] + (["b_qkv"] if r.bias else [])
        nodes = [self.node("Attention", inputs, ["merged"], num_heads=r.H,
                           unidirectional=r.causal)]
        return ORTCall(self, "Attention", p, threads, nodes + after, {"x": p.x_new}, constants,
                       {"y": p.x_new.shape})

    def layer_mha(self, p, threads):
        r = p.row
        before, after, constants = self.projections(p)
        split, sizes = self.split(p)
        nodes = before + split + [self.node("MultiHeadAttention", ["q", "k", "v"], ["merged"],
                                            num_heads=r.H, unidirectional=r.causal)] + after
        return ORTCall(self, "MultiHeadAttention", p, threads, nodes, {"x": p.x_new},
                       {**constants, **sizes}, {"y": p.x_new.shape})

    def cache(self, p, k, v):
        """Buffers of keys and values with those before the new tokens filled in; the operator
        appends to them in place. And the two lengths it wants."""
        r = p.row
        past = {}
        for name, from_ in (("k", k), ("v", v)):
            buffer = np.zeros((r.B, r.G, p.S, p.d), np.float32)
            if r.past > 0:
                buffer[:, :, :r.past] = from_[:, :, :r.past]
            past["past_" + name] = buffer
        past["last"] = np.full([r.B], p.S - 1, np.int32)
        past["total"] = np.array(p.S, np.int32)
        return past, {"past_k": "present_k", "past_v": "present_v"}

    def layer_gqa(self, p, threads, prepack=True):
        r = p.row
        before, after, constants = self.projections(p)
        past, shared = self.cache(p, *(p.project_qkv()[1:] if r.past > 0 else (None, None)))
        nodes = before + [self.node(
            "GroupQueryAttention", ["qkv", "", "", "past_k", "past_v", "last", "total"],
            ["merged", "present_k", "present_v"], num_heads=r.H, kv_num_heads=r.G)] + after
        return ORTCall(self, "GroupQueryAttention" + ("" if prepack else ", weights not prepacked"),
                       p, threads, nodes, {"x": p.x_new, **past}, constants,
                       {"y": p.x_new.shape}, shared, prepack=prepack)

    def core_mha(self, p, threads):
        r = p.row
        given = {"q": p.tokens_first(p.q), "k": p.tokens_first(p.k), "v": p.tokens_first(p.v)}
        nodes = [self.node("MultiHeadAttention", ["q", "k", "v"], ["o"], num_heads=r.H,
                           unidirectional=r.causal if r.T > 1 else 0)]
        return ORTCall(self, "MultiHeadAttention", p, threads, nodes, given, {},
                       {"o": (r.B, r.T, r.D)}, shape="tokens first")

    def core_mha_heads_first(self, p, threads):
        r = p.row
        given = {"q": p.tokens_first(p.q), "k": p.k, "v": p.v}
        nodes = [self.node("MultiHeadAttention", ["q", "k", "v"], ["o"], num_heads=r.H,
                           unidirectional=r.causal if r.T > 1 else 0)]
        return ORTCall(self, "MultiHeadAttention, k v [B,H,S,d]", p, threads, nodes, given, {},
                       {"o": (r.B, r.T, r.D)}, shape="tokens first")

    def core_gqa(self, p, threads):
        r = p.row
        past, shared = self.cache(p, p.k, p.v)
        new = [p.tokens_first(a[:, :, p.S - r.T:]) for a in (p.k, p.v)]
        given = {"q": p.tokens_first(p.q), "k": new[0], "v": new[1], **past}
        nodes = [self.node(
            "GroupQueryAttention", ["q", "k", "v", "past_k", "past_v", "last", "total"],
            ["o", "present_k", "present_v"], num_heads=r.H, kv_num_heads=r.G)]
        return ORTCall(self, "GroupQueryAttention", p, threads, nodes, given, {},
                       {"o": (r.B, r.T, r.D)}, shared, shape="tokens first")

    def core_onnx(self, p, threads):
        r = p.row
        nodes = [self.node("Attention", ["q", "k", "v"], ["o"], "",
                           is_causal=r.causal if r.T > 1 else 0)]
        return ORTCall(self, "ONNX Attention", p, threads, nodes, {"q": p.q, "k": p.k, "v": p.v},
                       {}, {"o": p.q.shape})

    def empty(self):
        """Seconds of a model that does nothing."""
        x = np.zeros((1, 1), np.float32)
        call = ORTCall(self, "", None, 1, [self.node("Identity", ["x"], ["y"], "")], {"x": x},
                       {}, {"y": x.shape})
        seconds = call.run(2000, None)
        call.close()
        return min(seconds)


class ORTCall(Call):
    def __init__(self, peer, how, p, threads, nodes, given, constants, outputs, shared=(),
                 shape=None, prepack=True):
        helper, ort = peer.onnx.helper, peer.ort
        types = {np.dtype(np.float32): peer.onnx.TensorProto.FLOAT,
                 np.dtype(np.int32): peer.onnx.TensorProto.INT32}
        shared = dict(shared)
        self.how, self.p, self.shape = how, p, shape

        def info(name, array):
            return helper.make_tensor_value_info(name, types[array.dtype], array.shape)

        results = {name: np.full(size, np.nan, np.float32) for name, size in outputs.items()}
        graph = helper.make_graph(
            nodes, "peer", [info(n, a) for n, a in given.items()],
            [info(n, a) for n, a in results.items()] +
            [info(present, given[past]) for past, present in shared.items()],
            [peer.onnx.numpy_helper.from_array(a, n) for n, a in constants.items()])
        opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        if not prepack:
            options.add_session_config_entry("session.disable_prepacking", "1")
        try:
            self.session = ort.InferenceSession(model.SerializeToString(), options,
                                                providers=["CPUExecutionProvider"])
        except Exception as error:
            raise Skip(brief(error)) from None
        # The values keep the memory of the arrays they were made from.
        values = {n: ort.OrtValue.ortvalue_from_numpy(a) for n, a in {**given, **results}.items()}
        self.binding = self.session.io_binding()
        for name in given:
            self.binding.bind_ortvalue_input(name, values[name])
        for name in results:
            self.binding.bind_ortvalue_output(name, values[name])
        for past, present in shared.items():
            self.binding.bind_ortvalue_output(present, values[past])
        self.values, self.result = values, next(iter(results))
        # What session.run_with_iobinding does, without a layer of Python around it.
        self.raw = self.session._sess.run_with_iobinding
        self.raw_binding = self.binding._iobinding

    def call(self):
        self.raw(self.raw_binding, None)

    def output(self):
        y = self.values[self.result].numpy()
        if self.shape == "tokens first":
            r, p = self.p.row, self.p
            y = y.reshape(r.B, r.T, r.H, p.d).transpose(0, 2, 1, 3)
        return y

    def close(self):
        self.raw = self.raw_binding = self.binding = self.session = self.values = None


def brief(error):
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:160]


# ---------------------------------------------------------------- PyTorch

class PyTorch:
    name = "PyTorch"

    def __init__(self):
        try:
            import torch
        except (ImportError, OSError) as error:
            raise Skip(brief(error)) from None
        self.torch = torch
        self.version = f"PyTorch {torch.__version__}"

    def calls(self, p, part, threads):
        r = p.row
        if part == "core":
            ways = [self.core]
        elif r.past >= 0:
            ways = [self.decode]
        else:
            ways = [self.layer] + ([self.module] if r.H == r.G and r.bias and not r.causal else [])
        return [lambda way=way: TorchCall(self.torch, threads, *way(p)) for way in ways]

    def tensors(self, *arrays):
        return [None if a is None else self.torch.from_numpy(np.ascontiguousarray(a))
                for a in arrays]

    def sdpa(self, p):
        r, f = p.row, self.torch.nn.functional.scaled_dot_product_attention
        options = {"is_causal": bool(r.causal and r.T > 1)}
        if r.H != r.G:
            options["enable_gqa"] = True
        return lambda q, k, v: f(q, k, v, **options)

    def core(self, p):
        q, k, v = self.tensors(p.q, p.k, p.v)
        sdpa = self.sdpa(p)
        return "scaled_dot_product_attention", lambda: sdpa(q, k, v)

    def weights(self, p):
        return self.tensors(p.w_qkv.T, p.w_out.T, p.b_qkv, p.b_out)

    def layer(self, p):
        r, d, sdpa, linear = p.row, p.d, self.sdpa(p), self.torch.nn.functional.linear
        w_qkv, w_out, b_qkv, b_out = self.weights(p)
        x, = self.tensors(p.x_new)

        def call():
            heads = linear(x, w_qkv, b_qkv).view(r.B, r.T, r.H + 2 * r.G, d).transpose(1, 2)
            q, k, v = heads.split((r.H, r.G, r.G), dim=1)
            return linear(sdpa(q, k, v).transpose(1, 2).reshape(r.B, r.T, r.D), w_out, b_out)
        return "linear, scaled_dot_product_attention, linear", call

    def module(self, p):
        r = p.row
        x, *w = self.tensors(p.x_new, p.w_qkv.T, p.w_out.T, p.b_qkv, p.b_out)
        module = self.torch.nn.MultiheadAttention(r.D, r.H, batch_first=True).eval()
        with self.torch.no_grad():
            for to, from_ in zip((module.in_proj_weight, module.out_proj.weight,
                                  module.in_proj_bias, module.out_proj.bias), w):
                to.copy_(from_)
        return "nn.MultiheadAttention", lambda: module(x, x, x, need_weights=False)[0]

    def decode(self, p):
        r, d, sdpa, linear = p.row, p.d, self.sdpa(p), self.torch.nn.functional.linear
        w_qkv, w_out, b_qkv, b_out = self.weights(p)
        x, = self.tensors(p.x_new)
        cache = self.torch.from_numpy(np.concatenate(p.project_qkv()[1:], 1).astype(np.float32))
        new = cache[:, :, r.past:]
        new.zero_()
        k, v = cache.split((r.G, r.G), dim=1)

        def call():
            heads = linear(x, w_qkv, b_qkv).view(1, 1, r.H + 2 * r.G, d).transpose(1, 2)
            new.copy_(heads[:, r.H:])
            o = sdpa(heads[:, :r.H], k, v)
            return linear(o.transpose(1, 2).reshape(1, 1, r.D), w_out, b_out)
        return "linear, scaled_dot_product_attention on a cache, linear", call

    def empty(self):
        """Seconds of one operator on one number."""
        x = self.torch.zeros(1)
        return min(TorchCall(self.torch, 1, "", lambda: self.torch.add(x, x)).run(2000, None))


class TorchCall(Call):
    def __init__(self, torch, threads, how, function):
        self.torch, self.threads, self.how, self.function = torch, threads, how, function

    def call(self):
        self.y = self.function()

    def run(self, n, sweep):
        if self.torch.get_num_threads() != self.threads:
            self.torch.set_num_threads(self.threads)
        with self.torch.inference_mode():
            return super().run(n, sweep)

    def output(self):
        return self.y.numpy()

    def close(self):
        self.function = self.y = None


# ---------------------------------------------------------------- measuring

def settle(limit=0.2):
    """Waits until no thread of this process runs: those that a library leaves spinning for its
    next call would take a core from the next library."""
    end = time.perf_counter() + limit
    while time.perf_counter() < end:
        start, cpu = time.perf_counter(), time.process_time()
        time.sleep(0.001)
        if time.process_time() - cpu < 0.2 * (time.perf_counter() - start):
            return


def turn(call, options, sweep):
    """The seconds of the calls that fill a turn. The first call of a turn finds its threads
    asleep and the caches full of something else. Cold calls are to be like that; the others go
    on for long enough to leave it behind."""
    if sweep:
        return call.run(options.cold, sweep)
    seconds, n, end = call.run(1, None), 1, time.perf_counter() + options.turn
    while n <= 1024:
        seconds += call.run(n, None)
        if time.perf_counter() > end:
            break
        n *= 2
    return seconds


class Cell:
    """One row, part, heat and number of threads: who took part, and what they reached."""

    def __init__(self, row, part, heat, threads):
        self.name, self.part, self.heat, self.threads = row.name + heat, part, heat, threads
        self.seconds, self.how, self.errors, self.notes = {}, {}, {}, []

    def best(self, name):
        return min(self.seconds[name]) if self.seconds.get(name) else None

    def best_peer(self):
        times = [(self.best(n), n) for n in self.seconds if n != Ours.name and self.seconds[n]]
        return min(times) if times else (None, None)

    def ratio(self):
        ours, (peer, _) = self.best(Ours.name), self.best_peer()
        return peer / ours if ours and peer else None


def right_calls(cell, peer, p, part, threads):
    """The ways of one peer that give the right answer."""
    calls = []
    for make in peer.calls(p, part, threads):
        call = None
        try:
            call = make()
            call.run(1, None)
            error = p.error(part, call.output())
            if not error <= WRONG:
                raise Skip(f"WRONG by {error:.1e} of max|y|, left out")
            call.error = error
            calls.append(call)
        except Exception as error:
            how = f" ({call.how})" if call is not None and call.how else ""
            cell.notes.append(f"{peer.name}{how}: {brief(error)}")
            if call is not None:
                call.close()
    return calls


def measure(cell, peers, p, options, sweep):
    """Fills in the cell. All ways are tried shortly; the best of each peer then take turns."""
    chosen, cold = {}, options.sweep_call if sweep else None
    for peer in peers:
        calls = right_calls(cell, peer, p, cell.part, cell.threads)
        settle()
        if len(calls) > 1:
            trial = []
            for call in calls:
                trial.append(min(turn(call, options, cold) + turn(call, options, cold)))
                settle()
            order = sorted(range(len(calls)), key=trial.__getitem__)
            calls = [calls[i] for i in order]
            for call in calls[1:]:
                call.close()
        if calls:
            chosen[peer.name] = calls[0]
            cell.how[peer.name], cell.errors[peer.name] = calls[0].how, calls[0].error
            cell.seconds[peer.name] = []
    gc.collect()
    begin = time.perf_counter()
    for done in range(options.rounds):
        if done >= 3 and time.perf_counter() - begin > options.limit:
            break
        for name, call in chosen.items():
            cell.seconds[name] += turn(call, options, cold)
            settle()
    for call in chosen.values():
        call.close()


# ---------------------------------------------------------------- the report

def duration(seconds):
    ms = seconds * 1e3
    return f"{ms:.4f}" if ms < 1 else f"{ms:.3f}" if ms < 100 else f"{ms:.1f}"


def heading(row, names):
    """The sizes of a row, and the columns of its table."""
    length = f"T {row.T}" + (f" + {row.past} cached" if row.past >= 0 else "")
    kv = f" (kv {row.G})" if row.G != row.H else ""
    sizes = (f"B {row.B}, {length}, D {row.D}, heads {row.H}{kv}, "
             f"{'causal' if row.causal else 'no mask'}, {'bias' if row.bias else 'no bias'}")
    return (f"\n{row.name}: {sizes}\n  {'part':<10} {'threads':>7} " +
            " ".join(f"{n + ' ms':>12}" for n in names) + f" {'ratio':>7}  best peer")


def line(cell, names):
    times = [cell.best(n) for n in names]
    ratio, peer = cell.ratio(), cell.best_peer()[1]
    how = f"{peer}: {cell.how[peer]}" if peer and cell.how[peer] else peer
    return (f"  {cell.part + cell.heat:<10} {cell.threads:>7} " +
            " ".join(f"{duration(t) if t else '-':>12}" for t in times) +
            f" {f'{ratio:.2f}' if ratio else '-':>7}  {how or '-'}")


def differences(cells, names):
    """The largest of each part of a row."""
    for part in ("layer", "core"):
        off = {n: max(c.errors[n] for c in cells if c.part == part and n in c.errors)
               for n in names if any(c.part == part and n in c.errors for c in cells)}
        if off:
            yield (f"  {part} off by, of max|y|: " +
                   ", ".join(f"{n} {e:.1e}" for n, e in off.items()))


def summary(cells):
    rated = [c for c in cells if c.ratio()]
    if not rated:
        print("\nnothing to compare with")
        return
    ahead = [c for c in rated if c.ratio() >= 1]
    mean = math.exp(statistics.fmean(math.log(c.ratio()) for c in rated))
    print(f"\nours is no slower than the best peer in {len(ahead)} of {len(rated)} cells; "
          f"best peer / ours: {min(c.ratio() for c in rated):.2f} to "
          f"{max(c.ratio() for c in rated):.2f}, geometric mean {mean:.2f}")
    for part in ("layer", "core"):
        for threads in sorted({c.threads for c in rated}):
            some = [c.ratio() for c in rated if (c.part, c.threads) == (part, threads)]
            if some:
                mean = math.exp(statistics.fmean(map(math.log, some)))
                print(f"  {part}, {threads} thread{'s' * (threads > 1)}: {min(some):.2f} to "
                      f"{max(some):.2f}, geometric mean {mean:.2f}")
    behind = sorted((c for c in rated if c.ratio() < 1), key=Cell.ratio)
    if behind:
        print("behind in:")
        for c in behind:
            print(f"  {c.ratio():.2f}  {c.name} {c.part} {c.threads}T ({c.best_peer()[1]})")


def csv(cells):
    print("row,part,threads,peer,how,ms_median,ms_best,error,calls")
    for c in cells:
        for name, seconds in c.seconds.items():
            if seconds:
                how = c.how[name].replace(",", ";")
                print(f"{c.name},{c.part},{c.threads},{name},{how},"
                      f"{statistics.median(seconds) * 1e3:.6f},{min(seconds) * 1e3:.6f},"
                      f"{c.errors[name]:.2e},{len(seconds)}")


def processor():
    try:
        for text in open("/proc/cpuinfo"):
            if text.startswith("model name"):
                return text.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def arguments():
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="only these, with commas: tiny,gpt2-prefill,decode-768")
    parser.add_argument("--parts", default="layer,core", help="layer or core (default: both)")
    parser.add_argument("--threads", default=f"1,{cpus}" if cpus > 1 else "1",
                        help="numbers of threads (default: %(default)s)")
    parser.add_argument("--peers", default="openblas,ort,torch",
                        help="which to compare with (default: %(default)s)")
    parser.add_argument("--isa", default="auto",
                        help="instruction set of ours: avx2, avx512, ... (default: the best)")
    parser.add_argument("--quick", action="store_true", help="few repeats: a look, not a result")
    parser.add_argument("--csv", action="store_true",
                        help="comma-separated values on standard output, the rest on the other")
    options = parser.parse_args()
    known = [r.name for r in ROWS]
    wanted = options.rows.split(",") if options.rows else known
    for name in wanted:
        if name not in known:
            parser.error(f"no row {name}; there are {', '.join(known)}")
    options.rows = [r for r in ROWS if r.name in wanted]
    options.parts = [part for part in ("layer", "core") if part in options.parts.split(",")]
    try:
        options.threads = sorted({int(t) for t in options.threads.split(",")})
    except ValueError:
        parser.error(f"--threads {options.threads}: not numbers")
    if options.threads[0] < 1:
        parser.error("--threads: 1 or more")
    options.peers = options.peers.split(",")
    options.rounds = 6 if options.quick else 30      # turns of each
    options.turn = 0.01 if options.quick else 0.05   # seconds of a turn, or one call
    options.cold = 2 if options.quick else 4         # calls of a turn, where each has its sweep
    options.limit = 3 if options.quick else 40       # seconds after which a cell is cut short
    return options


def main():
    options = arguments()
    try:
        ours = Ours(options.isa)
    except Skip as skip:
        sys.exit(str(skip))
    peers = [ours]
    out = sys.stderr if options.csv else sys.stdout

    def report(text=""):
        print(text, file=out, flush=True)

    report(f"{processor()}, {os.cpu_count()} CPUs; {ours.version}")
    for name, make in (("openblas", OpenBLAS), ("ort", ONNXRuntime), ("torch", PyTorch)):
        if name in options.peers:
            try:
                peers.append(make())
                report(f"  {peers[-1].version}")
            except Skip as skip:
                report(f"  skipped: {make.name} ({skip})")
    for peer in peers:
        if hasattr(peer, "empty"):
            report(f"  an empty call of {peer.name} from Python takes "
                   f"{peer.empty() * 1e6:.1f} microseconds of each time below")
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5:
        report(f"  CAREFUL: other programs are running here (load {os.getloadavg()[0]:.1f}); "
               "with all threads, times may mean little")
    report("best times; ratio = best peer / ours, above 1 where ours is faster")
    names, cells, notes = [peer.name for peer in peers], [], set()
    gc.disable()
    for row in options.rows:
        p, first = Problem(row), len(cells)
        report(heading(row, names))
        for part in options.parts:
            for heat in ("-hot", "-cold") if row.past >= 0 else ("",):
                for threads in options.threads:
                    cell = Cell(row, part, heat, threads)
                    if heat == "-cold":
                        ours.lib.ours_sweep_init(SWEEP_BYTES, threads)
                        options.sweep_call = ours.lib.ours_sweep
                    progress(f"... {cell.name} {part} {threads}T")
                    measure(cell, peers, p, options, heat == "-cold")
                    progress("")
                    report(line(cell, names))
                    for note in cell.notes:
                        if (row, part, note) not in notes:
                            report(f"    {note}")
                            notes.add((row, part, note))
                    cells.append(cell)
        for text in differences(cells[first:], names):
            report(text)
        gc.collect()
    csv(cells) if options.csv else summary(cells)


if __name__ == "__main__":
    main()
