#!/usr/bin/env python3
# Run:  pip install torch && python3 tests/golden/make_golden.py
# Writes the golden test vectors (*.txt) beside itself, then checks them.
# With --check it writes nothing and only checks the files already there.
"""Golden test vectors for mha.h, computed with PyTorch.

Inputs are seeded float32 numbers.  PyTorch gets them converted to float64 and
its float64 results are rounded to float32 once, when they are stored: what the
files expect is more exact than any float32 implementation can be.

File format: text, '#' lines are comments, then any number of

    int <name> <value>
    float <name> <value>
    tensor <name> <ndim> <d0> <d1> ...
    v v v v v v v v             row-major, "%.9g" (exact for float32), 8 a line;
                                infinities are "inf" and "-inf", bools 0 and 1

Sizes: B batch, T queries ("seq"), S keys ("source_seq"), H heads, G kv heads,
D d_model.  A missing tensor means that the case does not use it.

  nn.MultiheadAttention (mha_*.txt)
    x [B,T,D]  source [B,S,d_source]  source_v [B,S,d_source_v]
        keys come from source, or from x if there is no source;
        values come from source_v, or from what the keys come from
    in_proj_weight [3D,D], or q_/k_/v_proj_weight;  in_proj_bias [3D];
    out_proj_weight [D,D];  out_proj_bias [D]
    key_allow [B,S];  allow and bias as below
    y [B,T,D]  attn [B,H,T,S]  attn_mean [B,T,S] (mean over the heads)
  F.scaled_dot_product_attention (sdpa_*.txt)
    q [B,H,T,d_k]  k [B,G,S,d_k]  v [B,G,S,d_v]  o [B,H,T,d_v]
    lse [B,H,T]  log-sum-exp of the scaled and masked scores
    causal: 0 none, 1 lower-right aligned, 2 upper-left aligned
    scale: 0 means the default, 1/sqrt(d_k)
  Masks in both kinds of file
    allow  1 = attend, 0 = do not (the inverse of nn.MultiheadAttention's masks)
    bias   added to the scaled scores, may be -inf
    Both are [T,S], or have 4 dimensions that broadcast to [B,H,T,S].
    Every query may attend to at least one key in every case.
"""

import argparse
import math
import pathlib
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

HERE = pathlib.Path(__file__).resolve().parent
TOLERANCE = 1e-6
LOWER_RIGHT, UPPER_LEFT = 1, 2
INF = float("inf")


# ---------------------------------------------------------------- the format

def save(name, call, ints, tensors, floats=None):
    """Write one case; `call` says which PyTorch call made the outputs."""
    version = torch.__version__.split("+")[0]
    out = [f"# {name}: {line}" if i == 0 else f"#   {line}"
           for i, line in enumerate(call.split("\n"))]
    out.append(f"# torch {version}, float64 results rounded to float32;"
               " written by make_golden.py")
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
             masks=dict, weights=None, grid=None):
    """One nn.MultiheadAttention case.

    S        source length; None for self-attention
    masks    function that returns {"allow", "bias", "key_allow"} as used
    weights  None, "mean" (store attn_mean) or "heads" (store attn)
    grid     round inputs and parameters to multiples of 1/grid (short to print)
    """
    torch.manual_seed(seed)

    def randn(*shape, scale=1.0):
        values = torch.randn(shape) * scale
        return torch.round(values * grid) / grid + 0.0 if grid else values  # no -0

    module = torch.nn.MultiheadAttention(D, H, bias=has_bias, kdim=kdim, vdim=vdim,
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
        outputs["attn_mean" if weights == "mean" else "attn"] = attn

    names = "x, x, x" if S is None else \
        "x, source, source_v" if vdim is not None else "x, source, source"
    dims = "" if kdim is None else f", kdim={kdim}, vdim={vdim}"
    shown = "".join(f", {k}={v}" if isinstance(v, bool) else
                    f", {k}=bias" if v.dtype != torch.bool else
                    f", {k}=~{'key_allow' if k == 'key_padding_mask' else 'allow'}"
                    for k, v in options.items())
    save(name, f"torch.nn.MultiheadAttention({D}, {H}, bias={has_bias}{dims},"
         f" batch_first=True)\n({names}{shown})",
         {"batch": B, "seq": T, "source_seq": key.shape[1], "d_model": D, "n_heads": H,
          "d_source": key.shape[2], "d_source_v": value.shape[2]},
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


# ------------------------------------- plain formulas, to check PyTorch against

def scaled_scores(q, k, scale):
    """q [B,H,T,d], k [B,G,S,d] -> [B,H,T,S]; H/G consecutive heads share a kv head."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return torch.einsum("bhtd,bhsd->bhts", q, k) * scale


def mask_scores(scores, case):
    """Apply whatever masks the case has to scores [B,H,T,S]."""
    if "bias" in case:
        scores = scores + case["bias"]
    if "allow" in case:
        scores = scores.masked_fill(case["allow"] == 0, -INF)
    if "key_allow" in case:
        scores = scores.masked_fill(case["key_allow"][:, None, None, :] == 0, -INF)
    if case.get("causal"):
        allow = causal_allow(*scores.shape[-2:], case["causal"])
        scores = scores.masked_fill(~allow, -INF)
    return scores


def attend(q, k, v, case, scale):
    """Output, attention weights and log-sum-exp of plain attention."""
    scores = mask_scores(scaled_scores(q, k, scale), case)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    attn = weights / total
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum("bhts,bhsd->bhtd", attn, v), attn, (top + torch.log(total))[..., 0]


def expect_sdpa(case):
    scale = case["scale"] or 1 / math.sqrt(case["d_k"])
    o, _, lse = attend(case["q"], case["k"], case["v"], case, scale)
    return {"o": o, "lse": lse}


def expect_mha(case):
    D, H = case["d_model"], case["n_heads"]
    if "in_proj_weight" in case:
        weights = case["in_proj_weight"].split(D)
    else:
        weights = [case[f"{p}_proj_weight"] for p in "qkv"]
    biases = case.get("in_proj_bias", torch.zeros(3 * D).double()).split(D)
    source = case.get("source", case["x"])
    q, k, v = (
        (torch.einsum("bti,oi->bto", inp, w) + b).unflatten(-1, (H, D // H)).transpose(1, 2)
        for inp, w, b in zip((case["x"], source, case.get("source_v", source)), weights, biases))
    o, attn, _ = attend(q, k, v, case, 1 / math.sqrt(D // H))
    y = torch.einsum("bti,oi->bto", o.transpose(1, 2).flatten(2), case["out_proj_weight"])
    return {"y": y + case.get("out_proj_bias", 0), "attn": attn, "attn_mean": attn.mean(1)}


def check():
    """Recompute every file's outputs from its inputs; True if all agree."""
    paths = sorted(HERE.glob("*.txt"))
    good = 0
    for path in paths:
        case = load(path)
        expected = (expect_mha if path.name.startswith("mha_") else expect_sdpa)(case)
        stored = [key for key in expected if key in case]
        worst = 0.0
        for key in stored:
            same = case[key].shape == expected[key].shape and case[key].isfinite().all()
            worst = max(worst, (case[key] - expected[key]).abs().max().item() if same else INF)
        ok = bool(stored) and worst <= TOLERANCE
        good += ok
        print(f"{'ok  ' if ok else 'FAIL'} {path.name:30} {path.stat().st_size:6} bytes  "
              f"{', '.join(stored)}: max difference {worst:.1e}")
    total = sum(path.stat().st_size for path in paths)
    print(f"{good} of {len(paths)} files ({total} bytes): PyTorch's outputs agree with plain "
          f"float64 formulas within {TOLERANCE:g}")
    return bool(paths) and good == len(paths)


def main():
    parser = argparse.ArgumentParser(description="Make and check the golden test vectors.")
    parser.add_argument("--check", action="store_true", help="only check the existing files")
    if not parser.parse_args().check:
        torch.backends.mha.set_fastpath_enabled(False)
        make_mha()
        make_sdpa()
    return 0 if check() else 1


if __name__ == "__main__":
    sys.exit(main())
