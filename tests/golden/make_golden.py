#!/usr/bin/env python3
# Run:  pip install torch transformers onnx onnxruntime
#       python3 tests/golden/make_golden.py
# Writes the golden test vectors (*.txt) beside itself, then checks them.  Those of a
# package that is not installed are left as they are; torch alone is needed.
# With --check it writes nothing and only checks the files already there.
"""Golden test vectors for mha.h, computed with PyTorch, Hugging Face transformers,
ONNX's reference evaluator and ONNX Runtime.

Inputs are seeded float32 numbers.  PyTorch gets them converted to float64 and
its float64 results are rounded to float32 once, when they are stored: what the
files expect is more exact than any float32 implementation can be.  So do the
others, but ONNX Runtime, which has float32 only (its files say so).  Where
transformers asks for float32 whatever its input (rotary angles, norms, softmax),
its own code is run with float64 in that place: see in_double().

File format: text, '#' lines are comments, then any number of

    int <name> <value>
    float <name> <value>
    tensor <name> <ndim> <d0> <d1> ...
    v v v v v v v v             row-major, "%.9g" (exact for float32), 8 a line;
                                infinities are "inf" and "-inf", bools 0 and 1

Sizes: B batch, T queries ("seq"), S keys ("source_seq"), H heads, G kv heads,
D d_model.  A missing tensor means that the case does not use it, a missing
number is 0: the default.

  A whole layer: nn.MultiheadAttention (mha_*.txt) and layers with GQA, positions,
  norms, windows and so on (layer_*.txt).  All have d_model
    x [B,T,D]  source [B,S,d_source]  source_v [B,S,d_source_v]
        keys come from source, or from x if there is no source;
        values come from source_v, or from what the keys come from
    in_proj_weight [3D,D], or q_/k_/v_proj_weight;  in_proj_bias [3D], or
    q_/k_/v_proj_bias;  out_proj_weight [D,H*d_v];  out_proj_bias [D]
    bias_k, bias_v [D], zero_attn: PyTorch's add_bias_kv and add_zero_attn
    qk_norm: 1 RMS, 2 layer norm of each head; norm_eps (0: 1e-6);
    q_norm, k_norm, q_norm_bias, k_norm_bias [d_k]
    key_allow [B,S];  allow, bias and the rest as below
    y [B,T,D]  attn [B,H,T,S]  attn_mean [B,T,S] (mean over the heads); of the
    weights of bias_kv and zero_attn, which come after the S of the keys, none
  Attention on q, k, v: F.scaled_dot_product_attention (sdpa_*.txt), ONNX's
  Attention (onnx_attention_*.txt), ONNX Runtime's operators (ort_*.txt)
    q [B,H,T,d_k]  k [B,G,S,d_k]  v [B,G,S,d_v]  o [B,H,T,d_v]
    lse [B,H,T]  log-sum-exp of the scaled and masked scores
    causal: 0 none, 1 lower-right aligned, 2 upper-left aligned
    scale: 0 means the default, 1/sqrt(d_k)
    heads_last: q, k, v, o are [B,T,H,d]
    past_k, past_v [B,G,P,d]: come before k and v; are not rotated again
  Rotary embedding alone (rope_*.txt, onnx_rotary_*.txt)
    x [B,H,T,d] or with heads_last [B,T,H,d]; rotated: the same
  Masks in the first two kinds of file
    allow  1 = attend, 0 = do not (the inverse of nn.MultiheadAttention's masks)
    bias   added to the scaled scores, may be -inf
    Both are [T,S], or have 4 dimensions that broadcast to [B,H,T,S].
    key_padding [B,S]  1 = do NOT attend: PyTorch's key_padding_mask as it is
    key_len [B]  keys from there on are not attended to
    windowed, left, right: keys p - left .. p + right of a query at position p
        (i + S - T, or i with causal 2), -1 for no limit
    Every query may attend to at least one key in every case but those that say so.
  What happens to scores, in both
    softcap: softcap * tanh(score / softcap);  alibi [H]: - slope * distance;
    sink [H]: one more score in the softmax, without a key
  Rotary positions in all three
    rope_layout: 1 pairs (i, i + width/2), 2 pairs (2i, 2i + 1)
    rope_width (0: all), rope_base (0: 10000), rope_scaling (1 linear, 2 NTK, 3 YaRN,
    4 Llama 3), rope_factor, rope_original, rope_beta_fast, rope_beta_slow,
    rope_attention, rope_low_freq, rope_high_freq: as in mha_rope of mha.h
    positions [B,T], source_positions [B,S]; 0, 1, ... if there are none
  Sequences of different lengths, one after the other, in the first two kinds
    cu_seq [B+1], cu_source [B+1]: sequence b is tokens cu_seq[b] .. cu_seq[b+1]-1
    x, y [seq,D];  q, o [H,seq,d];  k, v [G,source_seq,d];  lse [H,seq];
    attn [H,seq,S], S the longest source
"""

import argparse
import contextlib
import importlib.util
import math
import pathlib
import sys
import types
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

HERE = pathlib.Path(__file__).resolve().parent
TOLERANCE = 1e-6
LOWER_RIGHT, UPPER_LEFT = 1, 2
HALF, INTERLEAVED = 1, 2
LINEAR, NTK, YARN, LLAMA3 = 1, 2, 3, 4
RMS, LAYER = 1, 2
INF = float("inf")


# ---------------------------------------------------------------- the format

def version(*packages):
    """"torch 1.2.3" and so on."""
    return " and ".join(f"{p} {importlib.import_module(p).__version__.split('+')[0]}"
                        for p in packages)


def save(name, call, ints, tensors, floats=None, by=None):
    """Write one case; `call` says which call made the outputs, `by` of what."""
    by = by or f"{version('torch')}, float64 results rounded to float32"
    out = [f"# {name}: {line}" if i == 0 else f"#   {line}"
           for i, line in enumerate(call.split("\n"))]
    out.append(f"# {by}; written by make_golden.py")
    out += [f"int {key} {value}" for key, value in ints.items()]
    out += [f"float {key} {value:.9g}" for key, value in (floats or {}).items()]
    for key, tensor in tensors.items():
        out.append(" ".join(map(str, ["tensor", key, tensor.dim(), *tensor.shape])))
        values = [f"{v:.9g}" for v in tensor.detach().float().flatten().tolist()]
        out += [" ".join(values[i:i + 8]) for i in range(0, len(values), 8)]
    (HERE / f"{name}.txt").write_bytes(("\n".join(out) + "\n").encode("ascii"))


def load(path):
    """Read one case back: a dict of ints, floats and float64 tensors."""
    lines = [line.split() for line in path.read_text("ascii").splitlines()
             if not line.startswith("#")]
    case, at = {}, 0
    while at < len(lines):
        kind, name, *rest = lines[at]
        at += 1
        assert name not in case, f"{path.name}: {name} appears twice"
        if kind == "int":
            case[name] = int(rest[0])
        elif kind == "float":
            case[name] = float(rest[0])
        elif kind == "tensor":
            ndim, *shape = map(int, rest)
            assert ndim == len(shape), f"{path.name}: dimensions of {name}"
            count, values = math.prod(shape), []
            while len(values) < count:
                values += map(float, lines[at])
                at += 1
            assert len(values) == count, f"{path.name}: values of {name}"
            # through float32, because that is what a C reader gets
            case[name] = torch.tensor(values, dtype=torch.float32).double().view(shape)
        else:
            raise ValueError(f"{path.name}: unknown line kind {kind!r}")
    return case


# --------------------------------------------------------- inputs and masks

def random_allow(*shape):
    """A random 0/1 mask that leaves every query at least one key."""
    allow = torch.rand(shape) < 0.6
    return allow.scatter(-1, torch.randint(shape[-1], (*shape[:-1], 1)), True)


def random_bias(*shape):
    """A random additive mask, some entries -inf but never a whole row."""
    return torch.randn(shape).masked_fill(~random_allow(*shape), -INF)


def key_lengths(lengths, S):
    """key_allow [B,S]: the first lengths[b] keys are real, the rest padding."""
    return torch.arange(S) < torch.tensor(lengths)[:, None]


def causal_allow(T, S, alignment):
    """Query t may attend to keys 0..t, or 0..t+S-T if aligned lower-right."""
    shift = S - T if alignment == LOWER_RIGHT else 0
    return torch.arange(S) <= torch.arange(T)[:, None] + shift


# ------------------------------------------------------ nn.MultiheadAttention

def mha_case(name, seed, B, T, D, H, S=None, kdim=None, vdim=None, has_bias=True,
             masks=dict, weights=None, grid=None, bias_kv=False, zero_attn=False):
    """One nn.MultiheadAttention case.

    S        source length; None for self-attention
    masks    function that returns {"allow", "bias", "key_allow", "key_padding"} as used
    weights  None, "mean" (store attn_mean) or "heads" (store attn)
    grid     round inputs and parameters to multiples of 1/grid (short to print)
    """
    torch.manual_seed(seed)

    def randn(*shape, scale=1.0):
        values = torch.randn(shape) * scale
        return torch.round(values * grid) / grid + 0.0 if grid else values  # no -0

    module = torch.nn.MultiheadAttention(D, H, bias=has_bias, kdim=kdim, vdim=vdim,
                                         add_bias_kv=bias_kv, add_zero_attn=zero_attn,
                                         batch_first=True)
    # Our own parameters: PyTorch's biases start as zeros, and its weights are so
    # small that the softmax would be nearly flat and hide mistakes.
    params = {}
    with torch.no_grad():
        for key, param in module.named_parameters():
            fan_in = param.shape[-1] if param.dim() == 2 else D
            param.copy_(randn(*param.shape, scale=1.5 / math.sqrt(fan_in)))
            params[key.replace(".", "_")] = param.detach().clone()

    inputs = {"x": randn(B, T, D)}
    if S is not None:
        inputs["source"] = randn(B, S, kdim or D)
    if vdim is not None:
        inputs["source_v"] = randn(B, S, vdim)
    query = inputs["x"]
    key = inputs.get("source", query)
    value = inputs.get("source_v", key)

    masks = masks()
    options = {"need_weights": weights is not None}
    if weights:
        options["average_attn_weights"] = weights == "mean"
    if "key_allow" in masks:
        options["key_padding_mask"] = ~masks["key_allow"]
    if "key_padding" in masks:
        options["key_padding_mask"] = masks["key_padding"]
    if "allow" in masks:
        options["attn_mask"] = ~masks["allow"]
    if "bias" in masks:
        options["attn_mask"] = masks["bias"].double()
    if masks.get("allow", query).dim() == 4:       # PyTorch wants [B*H,T,S]
        options["attn_mask"] = options["attn_mask"].flatten(0, 1)

    with torch.no_grad():
        y, attn = module.double()(query.double(), key.double(), value.double(), **options)
    outputs = {"y": y}
    if weights:
        outputs["attn_mean" if weights == "mean" else "attn"] = attn[..., :key.shape[1]]

    names = "x, x, x" if S is None else \
        "x, source, source_v" if vdim is not None else "x, source, source"
    dims = "" if kdim is None else f", kdim={kdim}, vdim={vdim}"
    dims += ", add_bias_kv=True" * bias_kv + ", add_zero_attn=True" * zero_attn
    mask_names = {"attn_mask": "~allow", "key_padding_mask":
                  "key_padding" if "key_padding" in masks else "~key_allow"}
    shown = "".join(f", {k}={v}" if isinstance(v, bool) else
                    f", {k}=bias" if v.dtype != torch.bool else
                    f", {k}={mask_names[k]}"
                    for k, v in options.items())
    save(name, f"torch.nn.MultiheadAttention({D}, {H}, bias={has_bias}{dims},"
         f" batch_first=True)\n({names}{shown})",
         {"batch": B, "seq": T, "source_seq": key.shape[1], "d_model": D, "n_heads": H,
          "d_source": key.shape[2], "d_source_v": value.shape[2],
          **({"zero_attn": 1} if zero_attn else {})},
         {**inputs, **params, **masks, **outputs})


def make_mha():
    mha_case("mha_bias", 1, B=2, T=5, D=15, H=3)
    mha_case("mha_nobias", 2, B=2, T=5, D=10, H=2, has_bias=False)
    mha_case("mha_cross", 3, B=2, T=5, D=9, H=3, S=7)
    mha_case("mha_kdim_vdim", 4, B=2, T=5, D=9, H=3, S=7, kdim=6, vdim=11)
    mha_case("mha_key_padding", 5, B=3, T=5, D=9, H=3, S=7,
             masks=lambda: {"key_allow": key_lengths([7, 4, 1], 7)})
    mha_case("mha_attn_mask_bool", 6, B=2, T=5, D=9, H=3, S=7,
             masks=lambda: {"allow": random_allow(5, 7)})
    mha_case("mha_attn_mask_bool_3d", 7, B=2, T=5, D=9, H=3, S=7,
             masks=lambda: {"allow": random_allow(2, 3, 5, 7)})
    mha_case("mha_attn_mask_float", 8, B=2, T=5, D=9, H=3, S=7,
             masks=lambda: {"bias": random_bias(5, 7)})
    mha_case("mha_padding_and_causal", 9, B=2, T=7, D=9, H=3,
             masks=lambda: {"key_allow": key_lengths([7, 3], 7),
                            "allow": causal_allow(7, 7, LOWER_RIGHT)})
    mha_case("mha_need_weights", 10, B=2, T=5, D=9, H=3, S=7, weights="mean")
    mha_case("mha_need_weights_heads", 11, B=2, T=5, D=9, H=3, S=7, weights="heads")
    mha_case("mha_larger", 12, B=1, T=40, D=32, H=4, grid=8)
    # Sequence 2 of the first is padding throughout: it sees bias_k alone.
    mha_case("mha_bias_kv", 13, B=3, T=4, D=9, H=3, S=5, grid=16, bias_kv=True, weights="heads",
             masks=lambda: {"key_padding": ~key_lengths([5, 2, 0], 5)})
    mha_case("mha_zero_attn", 14, B=2, T=5, D=9, H=3, S=7, grid=16, zero_attn=True, weights="mean",
             masks=lambda: {"key_padding": torch.rand(2, 7) < 0.4, "bias": random_bias(5, 7)})
    mha_case("mha_bias_kv_zero_attn", 15, B=2, T=5, D=9, H=3, grid=16, bias_kv=True,
             zero_attn=True, weights="heads",
             masks=lambda: {"key_padding": ~key_lengths([5, 3], 5),
                            "allow": causal_allow(5, 5, LOWER_RIGHT)})


# --------------------------------------------- F.scaled_dot_product_attention

def sdpa_case(name, seed, B, H, T, S, d_k, d_v=None, G=None, causal=0, scale=0.0,
              masks=dict, lse=False):
    """One scaled_dot_product_attention case; G kv heads, `scale` exact in float32."""
    torch.manual_seed(seed)
    d_v, G = d_v or d_k, G or H
    q = 2 * torch.randn(B, H, T, d_k)              # 2: keep the softmax from being flat
    k, v = torch.randn(B, G, S, d_k), torch.randn(B, G, S, d_v)
    tensors = {"q": q, "k": k, "v": v, **masks()}

    options, shown = {}, ""
    if scale:
        options["scale"] = scale
        shown += f", scale={scale}"
    if G != H:
        options["enable_gqa"] = True
        shown += ", enable_gqa=True"
    if causal == LOWER_RIGHT and T != S:
        options["attn_mask"] = causal_lower_right(T, S)
        shown += f", attn_mask=torch.nn.attention.bias.causal_lower_right({T}, {S})"
    elif causal:                                   # PyTorch aligns upper-left
        options["is_causal"] = True
        shown += ", is_causal=True"
    for key in ("allow", "bias"):                  # here PyTorch's True is "attend"
        if key in tensors:
            options["attn_mask"] = tensors[key] if key == "allow" else tensors[key].double()
            shown += f", attn_mask={key}"

    tensors["o"] = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), **options)
    if lse:
        scores = scaled_scores(q.double(), k.double(), scale or 1 / math.sqrt(d_k))
        scores = mask_scores(scores, {**tensors, "causal": causal})
        tensors["lse"] = torch.logsumexp(scores, -1)
    call = f"torch.nn.functional.scaled_dot_product_attention(\nq, k, v{shown})"
    if lse:
        call += "\nlse: torch.logsumexp of the scaled and masked scores"
    save(name, call,
         {"batch": B, "heads": H, "kv_heads": G, "seq": T, "source_seq": S,
          "d_k": d_k, "d_v": d_v, "causal": causal},
         tensors, {"scale": scale})


def make_sdpa():
    sdpa_case("sdpa_plain", 101, B=2, H=3, T=5, S=7, d_k=5, lse=True)
    sdpa_case("sdpa_causal_square", 102, B=2, H=2, T=7, S=7, d_k=5, causal=LOWER_RIGHT)
    sdpa_case("sdpa_causal_upper_left", 103, B=2, H=2, T=5, S=9, d_k=5, causal=UPPER_LEFT)
    sdpa_case("sdpa_causal_lower_right", 104, B=2, H=2, T=5, S=9, d_k=5,
              causal=LOWER_RIGHT, lse=True)
    sdpa_case("sdpa_gqa", 105, B=2, H=6, G=2, T=5, S=7, d_k=5, lse=True)
    sdpa_case("sdpa_mqa_causal", 106, B=2, H=3, G=1, T=7, S=7, d_k=5, causal=LOWER_RIGHT)
    sdpa_case("sdpa_scale", 107, B=2, H=2, T=5, S=7, d_k=5, scale=0.6875)
    sdpa_case("sdpa_dv", 108, B=2, H=2, T=5, S=7, d_k=5, d_v=11)
    sdpa_case("sdpa_bool_mask", 109, B=2, H=3, T=5, S=7, d_k=5,
              masks=lambda: {"allow": random_allow(2, 1, 5, 7)})
    sdpa_case("sdpa_float_mask", 110, B=2, H=3, T=5, S=7, d_k=5, lse=True,
              masks=lambda: {"bias": random_bias(2, 3, 5, 7)})
    # More than one 256-key block; one shared kv head keeps the file small.  The seed
    # is one with which 5 of the 18 queries have their largest score past key 255, so
    # that a running maximum has to be raised there.
    sdpa_case("sdpa_long", 112, B=1, H=2, G=1, T=9, S=300, d_k=3, lse=True)


# ------------------------------------------------------- what the cases below share

def on_grid(*shape, scale=1.0, grid=16):
    """Random multiples of 1/grid: short to print."""
    return torch.round(torch.randn(shape) * scale * grid) / grid + 0.0  # no -0


def store(name, call, packages, ints, floats, tensors, exact=True):
    """save() if the plain formulas at the end of this file agree.

    exact  the results are float64, and have to agree to nearly the last digit: a
           float32 anywhere on their way would show
    """
    tensors = {key: value for key, value in tensors.items() if value is not None}
    ints = {key: value for key, value in ints.items() if value}
    case = {**ints, **floats, **{key: value.double() for key, value in tensors.items()}}
    worst = differences(case)
    assert worst and max(worst.values()) <= (1e-12 if exact else TOLERANCE), (name, worst)
    kind = "float64 results rounded to float32" if exact else "float32 results"
    save(name, call, ints, tensors, floats, f"{version(*packages)}, {kind}")


def heads(x, n):
    """[B,T,n*d] -> [B,n,T,d]"""
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def complex_rotation(x, positions, frequencies, attention=1.0):
    """x [...,T,d] turned as Meta's Llama does it: neighbours are a complex number."""
    angles = positions.double()[:, None, :, None] * frequencies
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) \
        * torch.polar(torch.full_like(angles, attention), angles)
    return torch.view_as_real(turned).flatten(-2)


def layer_parameters(D, H, G, d, d_source=None):
    """Projections with biases for a layer without a module."""
    sizes = {"q": (H * d, D), "k": (G * d, d_source or D), "v": (G * d, d_source or D),
             "out": (D, H * d)}
    params = {}
    for key, (rows, columns) in sizes.items():
        params[f"{key}_proj_weight"] = on_grid(rows, columns, scale=1.5 / math.sqrt(columns))
        params[f"{key}_proj_bias"] = on_grid(rows, scale=0.5)
    return params


def project(params, key, x):
    return F.linear(x, params[f"{key}_proj_weight"].double(), params[f"{key}_proj_bias"].double())


# ------------------------------------------------- masks and scores, PyTorch alone

def window_allow(T, S, left, right):
    """flash-attention's window: key j of query i iff i+S-T-left <= j <= i+S-T+right."""
    row, column = torch.arange(T)[:, None] + S - T, torch.arange(S)
    allow = torch.ones(T, S, dtype=torch.bool)
    if left >= 0:
        allow &= column >= row - left
    if right >= 0:
        allow &= column <= row + right
    return allow


def scores_case(name, seed, B, H, T, S, d_k, G=None, causal=0, left=None, right=None, softcap=0.0,
                alibi=False, sink=False, key_lens=None, bias=False):
    """Attention on q, k, v, written out in PyTorch: one line for each thing mha_sdpa does."""
    torch.manual_seed(seed)
    G = G or H
    q, k, v = on_grid(B, H, T, d_k, scale=2.0), on_grid(B, G, S, d_k), on_grid(B, G, S, d_k)
    tensors = {"q": q, "k": k, "v": v}
    keys, values = (t.double().repeat_interleave(H // G, 1) for t in (k, v))
    scores = q.double() @ keys.mT / math.sqrt(d_k)
    call = ["scores = q @ k.mT / sqrt(d_k)"]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
        call.append(f"scores = {softcap} * tanh(scores / {softcap})")
    if bias:
        tensors["bias"] = random_bias(T, S)
        scores = scores + tensors["bias"].double()
        call.append("scores += bias")
    if alibi:
        tensors["alibi"] = on_grid(H).abs() + 0.0625
        row, column = torch.arange(T)[:, None] + S - T, torch.arange(S)
        scores = scores - tensors["alibi"].double()[:, None, None] * (row - column).abs()
        call.append("scores -= alibi * |i + S - T - j|")
    if causal:
        scores = scores.masked_fill(~causal_allow(T, S, causal), -INF)
        call.append("scores = -inf where j > i + S - T")
    if left is not None:
        scores = scores.masked_fill(~window_allow(T, S, left, right), -INF)
        call.append(f"scores = -inf outside of flash-attention's window_size=({left}, {right})")
    if key_lens:
        tensors["key_len"] = torch.tensor(key_lens)
        scores = scores.masked_fill(~key_lengths(key_lens, S)[:, None, None], -INF)
        call.append("scores = -inf where j >= key_len")
    columns = scores
    if sink:
        tensors["sink"] = on_grid(H)
        column = tensors["sink"].double()[None, :, None, None].expand(B, H, T, 1)
        columns = torch.cat([scores, column], -1)
        call.append("scores = cat(scores, sink)")
    tensors["o"] = torch.softmax(columns, -1)[..., :S] @ values
    tensors["lse"] = torch.logsumexp(columns, -1)
    call.append("o = softmax(scores)[..., :S] @ v;  lse = logsumexp(scores)")
    windowed = left is not None
    store(name, "\n".join(call), ["torch"],
          {"batch": B, "heads": H, "kv_heads": G, "seq": T, "source_seq": S, "d_k": d_k,
           "d_v": d_k, "causal": causal, "windowed": int(windowed),
           "left": left or 0, "right": right or 0},
          {"softcap": softcap} if softcap else {}, tensors)


def ragged_case(name, seed, lengths, sources, H, G, d):
    """scaled_dot_product_attention of each sequence alone, lower-right causal."""
    torch.manual_seed(seed)
    cu_seq, cu_source = (torch.tensor([0, *n]).cumsum(0) for n in (lengths, sources))
    q = on_grid(H, sum(lengths), d, scale=2.0)
    k, v = on_grid(G, sum(sources), d), on_grid(G, sum(sources), d)
    o, lse = [], []
    for (a, b), (c, e) in zip(spans(cu_seq), spans(cu_source)):
        if a < b:
            one = [t.double()[None] for t in (q[:, a:b], k[:, c:e], v[:, c:e])]
            allow = causal_allow(b - a, e - c, LOWER_RIGHT)
            o.append(F.scaled_dot_product_attention(*one, attn_mask=allow, enable_gqa=True)[0])
            scores = scaled_scores(one[0], one[1], 1 / math.sqrt(d))
            lse.append(torch.logsumexp(scores.masked_fill(~allow, -INF), -1)[0])
    store(name, "torch.nn.functional.scaled_dot_product_attention(q, k, v,\nattn_mask="
          "causal, lower-right aligned, enable_gqa=True) of each sequence alone;"
          "\nlse: torch.logsumexp of the scaled and masked scores", ["torch"],
          {"batch": len(lengths), "heads": H, "kv_heads": G, "seq": sum(lengths),
           "source_seq": sum(sources), "d_k": d, "d_v": d, "causal": LOWER_RIGHT}, {},
          {"cu_seq": cu_seq, "cu_source": cu_source, "q": q, "k": k, "v": v,
           "o": torch.cat(o, 1), "lse": torch.cat(lse, 1)})


def meta_case(name, seed, B, T, D, H, G, d, S=None, width=0):
    """A layer with Meta's rotation and positions of its own; S: cross-attention."""
    torch.manual_seed(seed)
    params = layer_parameters(D, H, G, d)
    x, source = on_grid(B, T, D), None if S is None else on_grid(B, S, D)
    positions = torch.randint(0, 200, (B, T))
    source_positions = None if S is None else torch.randint(0, 200, (B, S))
    q = heads(project(params, "q", x.double()), H)
    inputs = (x if S is None else source).double()
    k, v = heads(project(params, "k", inputs), G), heads(project(params, "v", inputs), G)
    width = width or d
    frequencies = 10000.0 ** (-torch.arange(0, width, 2).double() / width)

    def turned(t, at):
        return torch.cat([complex_rotation(t[..., :width], at, frequencies), t[..., width:]], -1)

    o = F.scaled_dot_product_attention(
        turned(q, positions), turned(k, positions if S is None else source_positions), v,
        is_causal=S is None, enable_gqa=True)
    y = project(params, "out", o.transpose(1, 2).flatten(2))
    store(name, "torch.nn.functional.linear; view_as_complex(q or k) * polar(1, positions *"
          " frequencies);\ntorch.nn.functional.scaled_dot_product_attention("
          f"is_causal={S is None}, enable_gqa=True); linear", ["torch"],
          {"batch": B, "seq": T, "source_seq": S or T, "d_model": D, "n_heads": H,
           "n_kv_heads": G, "d_k": d, "causal": int(S is None), "rope_layout": INTERLEAVED,
           "rope_width": 0 if width == d else width}, {},
          {"x": x, "source": source, **params, "positions": positions,
           "source_positions": source_positions, "y": y})


def make_torch():
    scores_case("sdpa_softcap", 201, B=1, H=2, T=4, S=7, d_k=5, softcap=1.5)
    scores_case("sdpa_alibi_both_ways", 202, B=1, H=4, G=2, T=4, S=7, d_k=5, alibi=True)
    scores_case("sdpa_window", 203, B=1, H=2, T=6, S=9, d_k=5, left=2, right=1)
    scores_case("sdpa_window_left", 204, B=1, H=2, T=5, S=8, d_k=4, left=3, right=-1)
    scores_case("sdpa_window_right", 205, B=1, H=2, T=5, S=8, d_k=4, left=-1, right=0)
    scores_case("sdpa_window_long", 206, B=1, H=1, T=4, S=300, d_k=2, left=270, right=-1,
                causal=LOWER_RIGHT)
    # More queries than keys: the first stand before key 0, at negative positions.
    scores_case("sdpa_window_more_queries", 212, B=1, H=2, T=7, S=3, d_k=4, left=2, right=5,
                alibi=True)
    scores_case("sdpa_sink", 207, B=1, H=4, G=2, T=4, S=6, d_k=5, sink=True, causal=LOWER_RIGHT)
    scores_case("sdpa_everything", 208, B=2, H=4, G=2, T=5, S=8, d_k=4, sink=True, alibi=True,
                softcap=2.0, causal=LOWER_RIGHT, left=4, right=-1, key_lens=[8, 6], bias=True)
    ragged_case("sdpa_ragged", 209, [3, 0, 1, 5], [3, 2, 4, 6], H=4, G=2, d=4)
    meta_case("layer_meta", 210, B=2, T=5, D=8, H=4, G=2, d=8)
    meta_case("layer_meta_cross", 211, B=2, T=3, S=5, D=8, H=4, G=2, d=8, width=6)


# ------------------------------------------------------------ Hugging Face transformers

class Double:
    """torch, except that float32 is float64."""
    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextlib.contextmanager
def in_double(*modules):
    """Lets these modules of transformers compute in float64 where they ask for float32."""
    for module in modules:
        module.torch = Double()
    try:
        yield
    finally:
        for module in modules:
            module.torch = torch


def hf_modules(model):
    """transformers' modules for a model, and its class names' prefix."""
    prefix = "".join(word.capitalize() for word in model.split("_"))
    where = f"transformers.models.{model}"
    return (importlib.import_module(f"{where}.modeling_{model}"),
            importlib.import_module(f"{where}.configuration_{model}"), prefix)


def hf_config(model, rope, width, **config):
    """A configuration with transformers' words for the fields of mha_rope in `rope`."""
    _, configuration, prefix = hf_modules(model)
    kind = {0: "default", LINEAR: "linear", NTK: "dynamic", YARN: "yarn", LLAMA3: "llama3"}
    words = {"base": "rope_theta", "factor": "factor", "attention": "attention_factor",
             "original": "original_max_position_embeddings", "beta_fast": "beta_fast",
             "beta_slow": "beta_slow", "low_freq": "low_freq_factor",
             "high_freq": "high_freq_factor"}
    scaling = rope.get("scaling", 0)
    parameters = {"rope_type": kind[scaling], "rope_theta": 10000.0}
    parameters |= {words[key]: value for key, value in rope.items() if key != "scaling"}
    if scaling == LLAMA3:
        parameters = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} | parameters
    if scaling == NTK:                             # as for factor * 64 tokens: see hf_rotary
        parameters["factor"] = 1.0
        config["max_position_embeddings"] = 64
    if width:
        parameters["partial_rotary_factor"] = width / config["head_dim"]
    made = getattr(configuration, prefix + "Config")(rope_parameters=parameters, **config)
    made._attn_implementation = "eager"
    return made


def hf_rotary(model, config, rope):
    """transformers' module that gives cos and sin."""
    module, _, prefix = hf_modules(model)
    rotary = getattr(module, prefix + "RotaryEmbedding")(config)
    if rope.get("scaling") == NTK:
        utilities = importlib.import_module("transformers.modeling_rope_utils")
        rotary.inv_freq, _ = utilities.ROPE_INIT_FUNCTIONS["dynamic"](
            config, seq_len=int(64 * rope["factor"]))
        rotary.rope_type = "default"               # keep these
    return rotary


def rope_fields(rope):
    """`rope` as numbers of a file: (ints, floats)."""
    ints = {f"rope_{key}": rope[key] for key in ("scaling", "original") if key in rope}
    return ints, {f"rope_{key}": value for key, value in rope.items()
                  if f"rope_{key}" not in ints}


def rope_case(name, seed, layout, d, width=0, B=1, H=1, positions=(0, 1, 77, 3000), **rope):
    """Rotation alone: frequencies of transformers, applied by it or by complex numbers."""
    torch.manual_seed(seed)
    explicit = positions is not None
    at = torch.tensor([positions if explicit else list(range(3))] * B)
    if explicit and B > 1:
        at = at + 5 * torch.arange(B)[:, None]
    x = on_grid(B, H, at.shape[1], d)
    n = width or d
    llama = hf_modules("llama")[0]
    with in_double(llama, importlib.import_module("transformers.modeling_rope_utils")):
        config = hf_config("llama", rope, 0, hidden_size=n, num_attention_heads=1, head_dim=n)
        rotary = hf_rotary("llama", config, rope)
        turned = x[..., :n].double()
        if layout == HALF:
            turned, _ = llama.apply_rotary_pos_emb(turned, turned, *rotary(turned, at))
            how = "apply_rotary_pos_emb(x, LlamaRotaryEmbedding(x, positions))"
        else:
            turned = complex_rotation(turned, at, rotary.inv_freq, rotary.attention_scaling)
            how = "torch.view_as_complex(x) * polar(attention, positions * inv_freq)"
    assert rotary.inv_freq.dtype == torch.float64
    ints, floats = rope_fields(rope)
    store(name, f"{how}\ninv_freq of transformers' "
          f"{config.rope_parameters['rope_type']} rope", ["transformers", "torch"],
          {"batch": B, "heads": H, "seq": x.shape[2], "d": d, "rope_layout": layout,
           "rope_width": width, **ints}, floats,
          {"x": x, "positions": at if explicit else None,
           "rotated": torch.cat([turned, x[..., n:].double()], -1)})


def hf_call(module, x, mask, embeddings, cache=None):
    y, attn = module(x, position_embeddings=embeddings, past_key_values=cache,
                     attention_mask=torch.zeros(mask.shape).double().masked_fill(~mask, -INF))
    assert y.dtype == attn.dtype == torch.float64
    return y, attn


def hf_case(name, seed, model, B=1, T=6, D=8, H=4, G=2, d=8, width=0, layout=HALF, window=0,
            right_limit=False, positions=None, lengths=None, rope=None, ints=None, floats=None,
            **config):
    """An attention layer of transformers, whole; and checked to do the same token by token.

    window       of sliding-window attention, in transformers' sense
    right_limit  the file says right = 0 instead of causal
    lengths      of the sequences of a ragged case, each done alone; B is 1
    """
    masks = importlib.import_module("transformers.masking_utils")
    cache_class = importlib.import_module("transformers.cache_utils").DynamicCache
    module, _, prefix = hf_modules(model)
    torch.manual_seed(seed)
    rope = rope or {}
    x = on_grid(B, sum(lengths) if lengths else T, D)
    function = masks.sliding_window_causal_mask_function(window) if window else \
        masks.causal_mask_function
    rename = {"o_proj": "out_proj", "dense": "out_proj", "sinks": "sink",
              "q_layernorm.weight": "q_norm", "k_layernorm.weight": "k_norm",
              "q_layernorm.bias": "q_norm_bias", "k_layernorm.bias": "k_norm_bias",
              "q_norm.weight": "q_norm", "k_norm.weight": "k_norm"}
    ys, attns, params = [], [], {}
    with in_double(module, importlib.import_module("transformers.modeling_rope_utils")), \
            torch.no_grad():
        configuration = hf_config(model, rope, width, hidden_size=D, num_attention_heads=H,
                                  num_key_value_heads=G, head_dim=d, num_hidden_layers=1, **config)
        attention = getattr(module, prefix + "Attention")(configuration, 0).eval()
        for key, param in attention.named_parameters():
            stem, _, leaf = key.rpartition(".")
            file_key = rename.get(key) or f"{rename.get(stem, stem)}_{leaf}"
            if param.dim() == 2:
                param.copy_(on_grid(*param.shape, scale=1.5 / math.sqrt(param.shape[-1])))
            else:
                param.copy_(on_grid(*param.shape, scale=0.5) + float(file_key.endswith("_norm")))
            params[file_key] = param.detach().clone()
        attention = attention.double()
        rotary = hf_rotary(model, configuration, rope)
        for begin, end in spans(torch.tensor([0, *(lengths or [T])]).cumsum(0)):
            n = end - begin
            if n == 0:
                continue
            one = x[:, begin:end].double()
            at = torch.arange(n).expand(B, -1) if positions is None else torch.tensor(positions)
            cos, sin = rotary(one, at)
            mask = masks.sdpa_mask(batch_size=B, q_length=n, kv_length=n, mask_function=function,
                                   allow_is_causal_skip=False)
            y, attn = hf_call(attention, one, mask, (cos, sin))
            cache = cache_class()
            for t in range(n):
                now = slice(t, t + 1)
                step, _ = hf_call(attention, one[:, now], mask[:, :, now, :t + 1],
                                  (cos[:, now], sin[:, now]), cache)
                assert (step - y[:, now]).abs().max() < 1e-12
            ys.append(y)
            attns.append(F.pad(attn, (0, max(lengths or [T]) - n)))
    y, attn = torch.cat(ys, 1), torch.cat(attns, 2)
    rope_ints, rope_floats = rope_fields(rope)
    ragged = {}
    if lengths:
        ragged = {"cu_seq": torch.tensor([0, *lengths]).cumsum(0)}
        x, y, attn = x[0], y[0], attn[0]
    shown = ", ".join(f"{key}={value}" for key, value in configuration.rope_parameters.items())
    store(name, f"transformers' {prefix}Attention and {prefix}RotaryEmbedding"
          + (", each sequence alone" if lengths else "") + f",\n{shown}"
          + (f",\nsliding window {window}" if window else ""), ["transformers", "torch"],
          {"batch": len(lengths or range(B)), "seq": len(x) if lengths else T,
           "source_seq": len(x) if lengths else T, "d_model": D,
           "n_heads": H, "n_kv_heads": G, "d_k": d, "causal": int(not right_limit),
           "windowed": int(window > 0), "left": max(window - 1, 0),
           "right": -1 if window and not right_limit else 0, "rope_layout": layout,
           "rope_width": width, **rope_ints, **(ints or {})},
          {**rope_floats, **(floats or {})},
          {"x": x, **params, **ragged, "positions": None if positions is None
           else torch.tensor(positions), "y": y, "attn": attn})


def hf_alibi(name, seed, H, T, S, d):
    """Slopes and biases of transformers' BLOOM; its biases do not depend on the query."""
    torch.manual_seed(seed)
    bloom = hf_modules("bloom")[0]
    with in_double(bloom):
        slopes = bloom._get_alibi_slopes(H, torch.device("cpu"))
        biases = bloom.build_alibi_tensor(torch.ones(1, S), H, torch.float64)
    q, k, v = on_grid(1, H, T, d, scale=2.0), on_grid(1, H, S, d), on_grid(1, H, S, d)
    mask = biases[None].masked_fill(~causal_allow(T, S, LOWER_RIGHT), -INF)
    o = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask)
    rounded = slopes.float().double()              # what a reader of the file gets
    distance = query_minus_key(T, S, {})
    scores = scaled_scores(q.double(), k.double(), 1 / math.sqrt(d))
    scores = scores - rounded[:, None, None] * distance
    lse = torch.logsumexp(scores.masked_fill(distance < 0, -INF), -1)
    store(name, "torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask),\n"
          f"mask: transformers' build_alibi_tensor for {H} heads, causal, lower-right aligned;\n"
          "alibi: its slopes.  lse: torch.logsumexp with -slope * distance",
          ["transformers", "torch"],
          {"batch": 1, "heads": H, "kv_heads": H, "seq": T, "source_seq": S, "d_k": d, "d_v": d,
           "causal": LOWER_RIGHT, "usual_slopes": 1}, {},
          {"q": q, "k": k, "v": v, "alibi": slopes, "o": o, "lse": lse},
          exact=torch.equal(rounded, slopes))


def hf_alibi_layer(name, seed, B, T, D, H):
    """A layer with the biases of transformers' MPT."""
    torch.manual_seed(seed)
    params = layer_parameters(D, H, H, D // H)
    x = on_grid(B, T, D)
    mask = hf_modules("mpt")[0].build_mpt_alibi_tensor(H, T).double()
    mask = mask.masked_fill(~causal_allow(T, T, LOWER_RIGHT), -INF)
    q, k, v = (heads(project(params, key, x.double()), H) for key in "qkv")
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None])
    y = project(params, "out", o.transpose(1, 2).flatten(2))
    # Slope h is what the bias falls by from one key to the one before.
    alibi = mask[:, -1, -1] - mask[:, -1, -2]
    store(name, "torch.nn.functional.linear, scaled_dot_product_attention(q, k, v, attn_mask=mask),"
          f" linear;\nmask: transformers' build_mpt_alibi_tensor({H}, {T}), causal",
          ["transformers", "torch"],
          {"batch": B, "seq": T, "source_seq": T, "d_model": D, "n_heads": H,
           "causal": LOWER_RIGHT, "usual_slopes": 1}, {},
          {"x": x, **params, "alibi": alibi, "y": y})


def hf_scores(name, seed, model, B, H, G, T, S, d, allow, ints, softcap=0.0, sink=False):
    """transformers' eager_attention_forward of a model, on q, k, v."""
    torch.manual_seed(seed)
    q, k, v = on_grid(B, H, T, d, scale=2.0), on_grid(B, G, S, d), on_grid(B, G, S, d)
    sinks = on_grid(H) if sink else None
    module = hf_modules(model)[0]
    fake = types.SimpleNamespace(num_key_value_groups=H // G, training=False,
                                 sinks=sinks.double() if sink else None)
    mask = torch.zeros(1, 1, T, S).double().masked_fill(~allow, -INF)
    with in_double(module):
        o, _ = module.eager_attention_forward(fake, q.double(), k.double(), v.double(), mask,
                                              scaling=d ** -0.5, **({"softcap": softcap} if softcap
                                                                    else {}))
    store(name, f"transformers' eager_attention_forward of {model}", ["transformers", "torch"],
          {"batch": B, "heads": H, "kv_heads": G, "seq": T, "source_seq": S, "d_k": d, "d_v": d,
           **ints}, {"softcap": softcap} if softcap else {},
          {"q": q, "k": k, "v": v, "sink": sinks, "o": o.transpose(1, 2)})


def make_hf():
    masks = importlib.import_module("transformers.masking_utils")
    importlib.import_module("transformers.utils.logging").set_verbosity_error()

    rope_case("rope_half", 301, HALF, 10, B=2, H=2, positions=None)
    rope_case("rope_interleaved", 302, INTERLEAVED, 8, B=2, H=2, positions=(-3, 0, 5, 900),
              base=500000.0)
    rope_case("rope_half_partial", 303, HALF, 15, width=10, H=2)
    rope_case("rope_interleaved_partial", 304, INTERLEAVED, 9, width=6, H=2)
    rope_case("rope_linear", 305, HALF, 32, scaling=LINEAR, factor=4.0)
    rope_case("rope_ntk", 306, HALF, 32, scaling=NTK, factor=8.0)
    rope_case("rope_ntk_partial", 307, INTERLEAVED, 24, width=20, scaling=NTK, factor=2.5)
    rope_case("rope_yarn", 308, HALF, 32, scaling=YARN, factor=4.0, original=4096)
    rope_case("rope_yarn_betas", 309, INTERLEAVED, 36, width=32, scaling=YARN, factor=16.0,
              original=2048, base=50000.0, beta_fast=16.0, beta_slow=2.0, attention=1.25)
    # Both ends of the ramp at 0.
    rope_case("rope_yarn_short", 310, HALF, 16, scaling=YARN, factor=4.0, original=6)
    rope_case("rope_llama3", 311, HALF, 32, scaling=LLAMA3, factor=8.0, original=8192,
              base=500000.0)
    rope_case("rope_llama3_bands", 312, INTERLEAVED, 32, scaling=LLAMA3, factor=32.0,
              original=1024, low_freq=2.0, high_freq=8.0)

    far = [[3, 4, 5, 90, 91, 200], [0, 17, 1, 16, 250, 9]]
    hf_case("layer_llama", 320, "llama", B=2, attention_bias=True)
    hf_case("layer_llama_linear", 321, "llama", attention_bias=True, positions=far[:1],
            rope={"scaling": LINEAR, "factor": 4.0})
    hf_case("layer_llama_ntk", 322, "llama", attention_bias=True, positions=far[:1],
            rope={"scaling": NTK, "factor": 4.0})
    hf_case("layer_llama_yarn", 323, "llama", attention_bias=True, positions=far[:1],
            rope={"scaling": YARN, "factor": 8.0, "original": 256})
    hf_case("layer_llama_llama3", 324, "llama", B=2, attention_bias=True, positions=far,
            rope={"scaling": LLAMA3, "factor": 8.0, "original": 256, "base": 500.0})
    hf_case("layer_llama_ragged", 325, "llama", attention_bias=True, lengths=[4, 1, 0, 6])
    hf_case("layer_phi", 326, "phi", D=16, H=2, G=1, d=8, width=4, qk_layernorm=True,
            layer_norm_eps=0.0625, ints={"qk_norm": LAYER}, floats={"norm_eps": 0.0625})
    hf_case("layer_glm", 327, "glm", width=4, layout=INTERLEAVED, attention_bias=True)
    hf_case("layer_qwen3", 328, "qwen3", rms_norm_eps=1e-6, ints={"qk_norm": RMS})
    hf_case("layer_mistral", 329, "mistral", T=9, window=3)
    hf_case("layer_gemma2", 330, "gemma2", T=9, window=4, right_limit=True, floats={
        "softcap": 1.25, "scale": 0.25}, attn_logit_softcapping=1.25, query_pre_attn_scalar=16,
        layer_types=["sliding_attention"])
    hf_case("layer_gpt_oss", 331, "gpt_oss", T=9, window=3, attention_bias=True,
            layer_types=["sliding_attention"],
            rope={"scaling": YARN, "factor": 4.0, "original": 64, "base": 1000.0})

    hf_alibi("sdpa_alibi_8", 340, H=8, T=4, S=6, d=3)
    hf_alibi("sdpa_alibi_12", 341, H=12, T=4, S=6, d=2)
    hf_alibi_layer("layer_mpt", 342, B=1, T=6, D=12, H=6)
    token = torch.arange(7)
    allow = masks.sliding_window_bidirectional_mask_function(2)(0, 0, token[:, None], token)
    hf_scores("sdpa_gemma2", 343, "gemma2", 1, 4, 2, 7, 7, 4, allow,
              {"windowed": 1, "left": 2, "right": 2}, softcap=2.0)
    allow = masks.sdpa_mask(batch_size=1, q_length=3, kv_length=8, q_offset=5,
                            mask_function=masks.sliding_window_causal_mask_function(4))
    hf_scores("sdpa_gpt_oss", 344, "gpt_oss", 1, 4, 2, 3, 8, 4, allow,
              {"windowed": 1, "left": 3, "right": -1, "causal": LOWER_RIGHT}, sink=True)


# ------------------------------------------- ONNX's reference evaluator, ONNX Runtime

def onnx_model(op, inputs, outputs, opset, domain="", **attributes):
    """A model of one operator; inputs {name: tensor}, None where one is left out."""
    import onnx
    from onnx import helper, numpy_helper
    given = {key: value.numpy() for key, value in inputs.items() if value is not None}
    info = [helper.make_tensor_value_info(
        key, numpy_helper.from_array(value).data_type, value.shape)
        for key, value in given.items()]
    kind = numpy_helper.from_array(next(iter(given.values()))).data_type
    node = helper.make_node(op, [key if key in given else "" for key in inputs], outputs,
                            domain=domain, **attributes)
    graph = helper.make_graph([node], op, info, [
        helper.make_tensor_value_info(key, kind, None) for key in outputs])
    opsets = [helper.make_opsetid("", opset)] + [helper.make_opsetid(domain, 1)] * bool(domain)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), given


def evaluate(op, inputs, outputs, opset, **attributes):
    """The operator's results by ONNX's reference evaluator."""
    from onnx.reference import ReferenceEvaluator
    model, given = onnx_model(op, inputs, outputs, opset, **attributes)
    return [torch.from_numpy(t) for t in ReferenceEvaluator(model).run(None, given)]


def run_ort(op, inputs, outputs, opset=21, domain="com.microsoft", **attributes):
    """The operator's results by ONNX Runtime on a CPU."""
    import onnxruntime
    onnxruntime.set_default_logger_severity(4)
    model, given = onnx_model(op, inputs, outputs, opset, domain, **attributes)
    session = onnxruntime.InferenceSession(model.SerializeToString(),
                                           providers=["CPUExecutionProvider"])
    return [torch.from_numpy(t) for t in session.run(None, given)]


def shown(attributes):
    return ", ".join(f"{key}={value}" for key, value in attributes.items())


def onnx_attention(name, seed, opset, B, H, G, T, S, d, past=0, masks=dict, lens=None,
                   ints=None, floats=None, last=False, **attributes):
    torch.manual_seed(seed)
    q, k, v = on_grid(B, H, T, d, scale=2.0), on_grid(B, G, S, d), on_grid(B, G, S, d)
    before = [on_grid(B, G, past, d) if past else None for _ in range(2)]
    tensors, options = {"past_k": before[0], "past_v": before[1], **masks()}, dict(attributes)
    if "bias" in tensors:
        mask = tensors["bias"].double()
    else:
        mask = tensors.get("allow")
    inputs = dict(zip("QKV", (t.double() for t in (q, k, v))))
    if last:
        options |= {"q_num_heads": H, "kv_num_heads": G}
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
        inputs = {key: t.double().flatten(2) for key, t in zip("QKV", (q, k, v))}
    inputs |= {"attn_mask": mask, "past_key": None if before[0] is None else before[0].double(),
               "past_value": None if before[1] is None else before[1].double()}
    if lens:
        tensors["key_len"] = inputs["nonpad_kv_seqlen"] = torch.tensor(lens)
    o, = evaluate("Attention", inputs, ["Y"], opset, **options)
    store(name, f"Attention of opset {opset}, by ReferenceEvaluator\n"
          f"{shown(options) or 'no attributes'}", ["onnx"],
          {"batch": B, "heads": H, "kv_heads": G, "seq": T, "source_seq": past + S, "d_k": d,
           "d_v": d, "heads_last": int(last), **(ints or {})}, floats or {},
          {"q": q, "k": k, "v": v, **tensors, "o": o.unflatten(-1, (H, d)) if last else o})


def onnx_rotary(name, seed, B, H, T, d, width, interleaved, last):
    torch.manual_seed(seed)
    x, n = on_grid(B, T, H, d) if last else on_grid(B, H, T, d), width or d
    positions = torch.randint(0, 60, (B, T))
    angles = torch.arange(60).double()[:, None] * 10000.0 ** (-torch.arange(0, n, 2).double() / n)
    options = {"interleaved": int(interleaved), "rotary_embedding_dim": width}
    if last:
        options["num_heads"] = H
    out, = evaluate("RotaryEmbedding",
                    {"X": x.double().flatten(2) if last else x.double(), "cos": angles.cos(),
                     "sin": angles.sin(), "positions": positions}, ["Y"], 23, **options)
    store(name, "RotaryEmbedding of opset 23, by ReferenceEvaluator\n" + shown(options), ["onnx"],
          {"batch": B, "heads": H, "seq": T, "d": d, "heads_last": int(last),
           "rope_layout": INTERLEAVED if interleaved else HALF, "rope_width": width}, {},
          {"x": x, "positions": positions, "rotated": out.view(x.shape)})


def make_onnx():
    onnx_attention("onnx_attention_causal", 401, 23, B=1, H=4, G=2, T=4, S=6, d=4, last=True,
                   is_causal=1, ints={"causal": UPPER_LEFT})
    # Query 2 may attend to nothing; ONNX says that gives 0.
    onnx_attention("onnx_attention_softcap_mask", 402, 23, B=2, H=2, G=2, T=4, S=6, d=4,
                   softcap=1.5, scale=0.25, floats={"softcap": 1.5, "scale": 0.25},
                   masks=lambda: {"allow": random_allow(2, 1, 4, 6)
                                  & (torch.arange(4) != 2)[:, None]})
    onnx_attention("onnx_attention_past", 403, 24, B=1, H=4, G=2, T=3, S=3, past=5, d=4,
                   is_causal=1, ints={"causal": LOWER_RIGHT},
                   masks=lambda: {"bias": random_bias(3, 8)})
    onnx_attention("onnx_attention_lengths", 404, 24, B=3, H=2, G=1, T=3, S=7, d=4,
                   lens=[7, 2, 5])
    onnx_attention("onnx_attention_window", 405, 25, B=1, H=4, G=1, T=4, S=4, past=5, d=4,
                   left_window_size=3, right_window_size=1, softcap=2.0,
                   ints={"windowed": 1, "left": 3, "right": 1}, floats={"softcap": 2.0})
    onnx_rotary("onnx_rotary_half", 410, B=2, H=2, T=3, d=8, width=0, interleaved=False, last=True)
    onnx_rotary("onnx_rotary_interleaved", 411, B=2, H=2, T=3, d=9, width=6, interleaved=True,
                last=False)


def ort_gqa(name, seed, B, T, past=0, H=4, G=2, d=8, rotary=0, window=0, softcap=0.0, sink=False,
            lens=None):
    """GroupQueryAttention. lens: how many tokens each sequence has, in buffers for past."""
    torch.manual_seed(seed)
    q, k, v = (on_grid(B, n, T, d, scale=s) for n, s in ((H, 2.0), (G, 1.0), (G, 1.0)))
    before = [on_grid(B, G, past, d) for _ in range(2)]
    S = past + T
    sinks = on_grid(H) if sink else None
    angles = torch.arange(32)[:, None] * 10000.0 ** (-torch.arange(0, d, 2).double() / d)
    inputs = {"query": q.transpose(1, 2).flatten(2), "key": k.transpose(1, 2).flatten(2),
              "value": v.transpose(1, 2).flatten(2), "past_key": before[0],
              "past_value": before[1],
              "seqlens_k": torch.tensor(lens or [S] * B, dtype=torch.int32) - 1,
              "total_sequence_length": torch.tensor([max(lens or [S])], dtype=torch.int32),
              "cos_cache": angles.cos().float() if rotary else None,
              "sin_cache": angles.sin().float() if rotary else None,
              "position_ids": None, "attention_bias": None, "head_sink": sinks}
    options = {"num_heads": H, "kv_num_heads": G, "do_rotary": int(rotary > 0),
               "rotary_interleaved": int(rotary == INTERLEAVED),
               "local_window_size": window or -1, "softcap": softcap}
    o, present_k, present_v = run_ort("GroupQueryAttention", inputs,
                                      ["output", "present_key", "present_value"], **options)
    o = o.unflatten(-1, (H, d))
    tensors = {"q": q, "k": k, "v": v}
    if lens:                                       # where it puts the new token is its own affair
        tensors = {"q": q, "k": present_k[:, :, :max(lens)], "v": present_v[:, :, :max(lens)],
                   "key_len": torch.tensor(lens)}
        S = max(lens)
    elif past:
        tensors |= {"past_k": before[0], "past_v": before[1]}
        if rotary:
            tensors["positions"] = torch.arange(past, S).expand(B, -1)
    else:
        tensors = {key: t.transpose(1, 2).contiguous() for key, t in tensors.items()}
    last = not past
    store(name, f"GroupQueryAttention of com.microsoft\n{shown(options)}"
          + ("\nk, v: present_key and present_value" if lens else ""), ["onnxruntime"],
          {"batch": B, "heads": H, "kv_heads": G, "seq": T, "source_seq": S, "d_k": d, "d_v": d,
           "heads_last": int(last), "causal": LOWER_RIGHT, "windowed": int(window > 0),
           "left": max(window - 1, 0), "right": -1 if window else 0, "rope_layout": rotary},
          {"softcap": softcap} if softcap else {},
          {**tensors, "sink": sinks, "o": o if last else o.transpose(1, 2)}, exact=False)


def ort_mha(name, seed, B, H, T, S, d, causal=False, lens=None, bias=False):
    """MultiHeadAttention, which adds biases to q, k and v first: the file has the sums."""
    torch.manual_seed(seed)
    q, k, v = (on_grid(B, n, H * d, scale=s) for n, s in ((T, 2.0), (S, 1.0), (S, 1.0)))
    biases = on_grid(3 * H * d, scale=0.5)
    mask = torch.randn(1, H, T, S) if bias else None
    inputs = {"query": q, "key": k, "value": v, "bias": biases,
              "key_padding_mask": None if lens is None else torch.tensor(lens, dtype=torch.int32),
              "attention_bias": mask}
    options = {"num_heads": H, "unidirectional": int(causal)}
    o, = run_ort("MultiHeadAttention", inputs, ["output"], **options)
    added = [(t + b).unflatten(-1, (H, d)) for t, b in zip((q, k, v), biases.split(H * d))]
    store(name, f"MultiHeadAttention of com.microsoft\n{shown(options)};  q, k, v: with bias added"
          + (";  key_padding_mask=key_len" if lens else "")
          + (";  attention_bias=bias" if bias else ""), ["onnxruntime"],
          {"batch": B, "heads": H, "kv_heads": H, "seq": T, "source_seq": S, "d_k": d, "d_v": d,
           "heads_last": 1, "causal": UPPER_LEFT if causal else 0}, {},
          {**dict(zip("qkv", added)), "bias": mask,
           "key_len": None if lens is None else torch.tensor(lens),
           "o": o.unflatten(-1, (H, d))}, exact=False)


def make_ort():
    ort_gqa("ort_gqa", 501, B=1, T=5, window=3, softcap=1.5)
    ort_gqa("ort_gqa_rotary", 502, B=1, T=4, d=16, rotary=HALF)
    ort_gqa("ort_gqa_interleaved", 503, B=1, T=5, H=2, G=1, d=16, rotary=INTERLEAVED, window=2,
            softcap=3.0)
    ort_gqa("ort_gqa_past", 504, B=1, T=3, past=4, H=2, G=1, d=16, rotary=HALF, window=4)
    ort_gqa("ort_gqa_sink", 505, B=1, T=5, sink=True)
    ort_gqa("ort_gqa_lengths", 506, B=2, T=1, past=6, lens=[7, 4])
    ort_mha("ort_mha", 510, B=2, H=2, T=3, S=5, d=4, lens=[5, 3])
    ort_mha("ort_mha_bias", 511, B=1, H=2, T=4, S=4, d=4, causal=True, bias=True)


# ---------------------------------------- plain formulas, to check the others against

def scaled_scores(q, k, scale):
    """q [B,H,T,d], k [B,G,S,d] -> [B,H,T,S]; H/G consecutive heads share a kv head."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return torch.einsum("bhtd,bhsd->bhts", q, k) * scale


def cap_scores(scores, case):
    cap = case.get("softcap", 0)
    return cap * torch.tanh(scores / cap) if cap else scores


def query_minus_key(T, S, case):
    """[T,S] distances of the positions of queries and keys."""
    shift = 0 if case.get("causal") == UPPER_LEFT else S - T
    return torch.arange(T)[:, None] + shift - torch.arange(S)


def mask_scores(scores, case):
    """Apply whatever masks the case has to scores [B,H,T,S]."""
    T, S = scores.shape[-2:]
    distance = query_minus_key(T, S, case)
    if "bias" in case:
        scores = scores + case["bias"]
    if "alibi" in case:
        scores = scores - case["alibi"][:, None, None] * distance.abs()
    if "allow" in case:
        scores = scores.masked_fill(case["allow"] == 0, -INF)
    if "key_allow" in case:
        scores = scores.masked_fill(case["key_allow"][:, None, None, :] == 0, -INF)
    if "key_padding" in case:
        scores = scores.masked_fill(case["key_padding"][:, None, None, :] != 0, -INF)
    if "key_len" in case:
        past = torch.arange(S) >= case["key_len"][:, None, None, None]
        scores = scores.masked_fill(past, -INF)
    if case.get("causal"):
        allow = causal_allow(*scores.shape[-2:], case["causal"])
        scores = scores.masked_fill(~allow, -INF)
    if case.get("windowed"):
        if case.get("left", 0) >= 0:
            scores = scores.masked_fill(distance > case.get("left", 0), -INF)
        if case.get("right", 0) >= 0:
            scores = scores.masked_fill(-distance > case.get("right", 0), -INF)
    return scores


def attend(q, k, v, case, scale):
    """Output, attention weights and log-sum-exp of plain attention."""
    (B, H, T, _), G, S = q.shape, k.shape[1], k.shape[2]
    columns = [mask_scores(cap_scores(scaled_scores(q, k, scale), case), case)]
    values = [v]
    if "bias_k" in case:
        extra = case["bias_k"].reshape(1, G, 1, -1).expand(B, -1, -1, -1)
        columns.append(cap_scores(scaled_scores(q, extra, scale), case))
        values.append(case["bias_v"].reshape(1, G, 1, -1).expand(B, -1, -1, -1))
    if case.get("zero_attn"):
        columns.append(torch.zeros(B, H, T, 1))
        values.append(torch.zeros(B, G, 1, v.shape[-1]))
    scores, v = torch.cat(columns, -1), torch.cat(values, 2)
    top = scores.amax(-1, keepdim=True)
    blind = top == -INF
    top = top.masked_fill(blind, 0.0)
    if "sink" in case:
        top = torch.maximum(top, case["sink"][:, None, None])
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if "sink" in case:
        total = total + torch.exp(case["sink"][:, None, None] - top).masked_fill(blind, 0.0)
    attn = weights / total.masked_fill(blind, 1.0)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return (torch.einsum("bhts,bhsd->bhtd", attn, v), attn[..., :S],
            (top + torch.log(total))[..., 0])


def rope_frequencies(case, width):
    """The angle of a position further of each pair, and what multiplies cos and sin."""
    number = lambda name, default: case.get("rope_" + name) or default
    base, scaling, factor = number("base", 1e4), number("scaling", 0), number("factor", 1.0)
    if scaling == NTK:
        base *= factor ** (width / (width - 2))
    plain = [base ** (-2 * i / width) for i in range(width // 2)]
    if scaling == LINEAR:
        return [f / factor for f in plain], 1.0
    if scaling == YARN:
        def pair(turns):                           # the pair that turns so often in training
            return width * math.log(case["rope_original"] / (2 * math.pi * turns)) \
                / (2 * math.log(base))
        low = max(0, math.floor(pair(number("beta_fast", 32.0))))
        high = min(width - 1, math.ceil(pair(number("beta_slow", 1.0))))
        ramp = [min(1.0, max(0.0, (i - low) / (high - low or 0.001))) for i in range(width // 2)]
        return ([f / factor * r + f * (1 - r) for f, r in zip(plain, ramp)],
                number("attention", 0.1 * math.log(factor) + 1))
    if scaling == LLAMA3:
        low, high, out = number("low_freq", 1.0), number("high_freq", 4.0), []
        for f in plain:
            turns = case["rope_original"] * f / (2 * math.pi)
            smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
            out.append(f / factor * (1 - smooth) + f * smooth)
        return out, 1.0
    return plain, 1.0


def rotate(x, case, positions):
    """x [B,H,T,d] rotated; positions [B,T], or None: 0, 1, ..."""
    if not case.get("rope_layout"):
        return x
    width = case.get("rope_width") or x.shape[-1]
    if positions is None:
        positions = torch.arange(x.shape[2]).double().expand(x.shape[0], -1)
    frequencies, attention = rope_frequencies(case, width)
    x = x.clone()
    for i, f in enumerate(frequencies):
        a, b = (i, i + width // 2) if case["rope_layout"] == HALF else (2 * i, 2 * i + 1)
        cos, sin = (attention * fn(positions * f)[:, None] for fn in (torch.cos, torch.sin))
        x[..., a], x[..., b] = x[..., a] * cos - x[..., b] * sin, x[..., b] * cos + x[..., a] * sin
    return x


def norm(x, case, name):
    """qk_norm of x [...,d]."""
    if not case.get("qk_norm"):
        return x
    if case["qk_norm"] == LAYER:
        x = x - x.mean(-1, keepdim=True)
    x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + (case.get("norm_eps") or 1e-6))
    return x * case.get(name, 1.0) + case.get(name + "_bias", 0.0)


def spans(cumulated):
    ends = cumulated.long().tolist()
    return list(zip(ends, ends[1:]))


def expect_rotate(case):
    turn = (lambda t: t.transpose(1, 2)) if case.get("heads_last") else (lambda t: t)
    return {"rotated": turn(rotate(turn(case["x"]), case, case.get("positions")))}


def expect_sdpa(case):
    scale = case.get("scale") or 1 / math.sqrt(case["d_k"])
    if "cu_seq" in case:
        parts = [attend(case["q"][None, :, a:b], case["k"][None, :, c:d], case["v"][None, :, c:d],
                        case, scale)
                 for (a, b), (c, d) in zip(spans(case["cu_seq"]), spans(case["cu_source"]))
                 if a < b]
        return {"o": torch.cat([p[0][0] for p in parts], 1),
                "lse": torch.cat([p[2][0] for p in parts], 1)}
    turn = (lambda t: t.transpose(1, 2)) if case.get("heads_last") else (lambda t: t)
    q, k, v = (turn(case[name]) for name in "qkv")
    q, k = (rotate(t, case, case.get("positions")) for t in (q, k))
    if "past_k" in case:
        k, v = torch.cat([case["past_k"], k], 2), torch.cat([case["past_v"], v], 2)
    o, _, lse = attend(q, k, v, case, scale)
    return {"o": turn(o), "lse": lse}


def expect_layer(case):
    if "cu_seq" in case:
        whole = {key: value for key, value in case.items() if key != "cu_seq"}
        rows = [a_b for a_b in spans(case["cu_seq"]) if a_b[0] < a_b[1]]
        parts = [expect_layer({**whole, "x": case["x"][None, a:b]}) for a, b in rows]
        S = max(b - a for a, b in rows)
        return {"y": torch.cat([p["y"][0] for p in parts]),
                "attn": torch.cat([F.pad(p["attn"][0], (0, S - p["attn"].shape[-1]))
                                   for p in parts], 1)}
    D, H = case["d_model"], case["n_heads"]
    G, d = case.get("n_kv_heads") or H, case.get("d_k") or D // H
    sizes = [H * d, G * d, G * d]
    if "in_proj_weight" in case:
        weights = case["in_proj_weight"].split(sizes)
    else:
        weights = [case[f"{p}_proj_weight"] for p in "qkv"]
    if "in_proj_bias" in case:
        biases = case["in_proj_bias"].split(sizes)
    else:
        biases = [case.get(f"{p}_proj_bias", torch.zeros(n)) for p, n in zip("qkv", sizes)]
    source = case.get("source", case["x"])
    q, k, v = (
        (torch.einsum("bti,oi->bto", inp, w) + b).unflatten(-1, (-1, d)).transpose(1, 2)
        for inp, w, b in zip((case["x"], source, case.get("source_v", source)), weights, biases))
    positions = case.get("positions")
    q = rotate(norm(q, case, "q_norm"), case, positions)
    k = rotate(norm(k, case, "k_norm"), case,
               case.get("source_positions") if "source" in case else positions)
    o, attn, _ = attend(q, k, v, case, case.get("scale") or 1 / math.sqrt(d))
    y = torch.einsum("bti,oi->bto", o.transpose(1, 2).flatten(2), case["out_proj_weight"])
    return {"y": y + case.get("out_proj_bias", 0), "attn": attn, "attn_mean": attn.mean(1)}


def expect(case):
    kind = expect_layer if "d_model" in case else expect_rotate if "rotated" in case \
        else expect_sdpa
    return kind(case)


def differences(case):
    """{output: largest difference between the case and the plain formulas}."""
    expected, out = expect(case), {}
    for key in expected:
        if key in case:
            same = case[key].shape == expected[key].shape and case[key].isfinite().all()
            out[key] = (case[key] - expected[key]).abs().max().item() if same else INF
    return out


def check():
    """Recompute every file's outputs from its inputs; True if all agree."""
    paths = sorted(HERE.glob("*.txt"))
    good = 0
    for path in paths:
        stored = differences(load(path))
        worst = max(stored.values(), default=INF)
        ok = worst <= TOLERANCE
        good += ok
        print(f"{'ok  ' if ok else 'FAIL'} {path.name:34} {path.stat().st_size:6} bytes  "
              f"{', '.join(stored)}: max difference {worst:.1e}")
    total = sum(path.stat().st_size for path in paths)
    print(f"{good} of {len(paths)} files ({total} bytes): their outputs agree with plain "
          f"float64 formulas within {TOLERANCE:g}")
    return bool(paths) and good == len(paths)


def main():
    parser = argparse.ArgumentParser(description="Make and check the golden test vectors.")
    parser.add_argument("--check", action="store_true", help="only check the existing files")
    if not parser.parse_args().check:
        warnings.filterwarnings("ignore", "Support for mismatched key_padding_mask")
        torch.backends.mha.set_fastpath_enabled(False)
        make_mha()
        make_sdpa()
        make_torch()
        for package, make in (("transformers", make_hf), ("onnx", make_onnx),
                              ("onnxruntime", make_ort)):
            if importlib.util.find_spec(package):
                make()
            else:
                print(f"{package} is not installed: its files are left as they are")
    return 0 if check() else 1


if __name__ == "__main__":
    sys.exit(main())
