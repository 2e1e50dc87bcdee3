"""Reading of what was compiled for a GPU; and that two programs compile, where the plugin is."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu import gpu_check, gpu_programs
from benchmarks.gpu.gpu_programs import CASES, CUDA, Case, grown, totals
from benchmarks.gpu.prediction import Assumptions, Card, predicted_s
from benchmarks.lib.hlo import flops, read_program

PROGRAM = """HloModule jit_f, is_scheduled=true

%fused_slice (param_0: f32[100,8], param_1: s32[]) -> f32[1,8] {
  %param_0 = f32[100,8]{1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %dynamic-slice.1 = f32[1,8]{1,0} dynamic-slice(%param_0, %param_1, %zero), dynamic_slice_sizes={1,8}
}

%fused_add (param_0.1: f32[1,8]) -> f32[1,8] {
  %param_0.1 = f32[1,8]{1,0} parameter(0)
  ROOT %add.1 = f32[1,8]{1,0} add(%param_0.1, %param_0.1)
}

%body (arg: (s32[], f32[1,8], f32[100,8])) -> (s32[], f32[1,8], f32[100,8]) {
  %arg = (s32[], f32[1,8]{1,0}, f32[100,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = f32[100,8]{1,0} get-tuple-element(%arg), index=2
  %loop_slice_fusion = f32[1,8]{1,0} fusion(%x, %i), kind=kLoop, calls=%fused_slice
  %all-reduce-start = f32[1,8]{1,0} all-reduce-start(%loop_slice_fusion), to_apply=%sum
  %all-reduce-done = f32[1,8]{1,0} all-reduce-done(%all-reduce-start)
  ROOT %tuple = (s32[], f32[1,8]{1,0}, f32[100,8]{1,0}) tuple(%i, %all-reduce-done, %x)
}

%command_buffer (p: f32[1,8]) -> f32[1,8] {
  %p = f32[1,8]{1,0} parameter(0)
  %loop_add_fusion = f32[1,8]{1,0} fusion(%p), kind=kLoop, calls=%fused_add
  ROOT %custom-call.1 = (f32[1,8]{1,0}, s8[16]{0}) custom-call(%loop_add_fusion), custom_call_target="__cublas$gemm"
}

ENTRY %main (a: f32[100,8]) -> f32[1,8] {
  %a = f32[100,8]{1,0} parameter(0)
  %n = s32[] constant(0)
  %copy.1 = f32[100,8]{1,0} copy(%a)
  %start = (s32[], f32[1,8]{1,0}, f32[100,8]{1,0}) tuple(%n, %a, %copy.1)
  %while.1 = (s32[], f32[1,8]{1,0}, f32[100,8]{1,0}) while(%start), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %while.2 = (s32[], f32[1,8]{1,0}, f32[100,8]{1,0}) while(%start), condition=%c, body=%body
  %y = f32[1,8]{1,0} get-tuple-element(%while.1), index=1
  ROOT %call = f32[1,8]{1,0} call(%y), to_apply=%command_buffer
}
"""  # noqa: E501


def test_launches_are_multiplied_by_the_loops_around_them():
    work = read_program(PROGRAM)
    # a copy; five and one times a slice and a sum over devices; a kernel and a library call
    assert work.kinds == {
        "copy": 1, "fusion": 5 + 1 + 1, "all-reduce-start": 5 + 1, "__cublas$gemm": 1,
    }  # fmt: skip
    assert work.launches == 15
    assert work.loops == [5, None]
    assert (work.collectives, work.collective_bytes) == (6, 6 * 32)
    assert work.copies == 1


def test_a_slice_reads_as_much_as_it_gives():
    copied, added, multiplied = 3200 + 3200, 32 + 32, 32 + (32 + 16)
    in_loops = 6 * ((32 + 4 + 32) + (32 + 32))
    assert read_program(PROGRAM).moved_bytes == copied + added + multiplied + in_loops


def test_operations_of_a_traced_program():
    def network(x, kernel, image, filters):
        def layer(x, _):
            return jnp.tanh(x @ kernel), None

        out, _ = jax.lax.scan(layer, x, length=3)
        convolved = jax.lax.conv_general_dilated(
            image, filters, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return out.sum() + convolved.sum()

    shapes = [(4, 8), (8, 8), (2, 9, 9, 3), (3, 3, 3, 5)]
    jaxpr = jax.make_jaxpr(jax.jit(network))(*(jnp.zeros(s) for s in shapes))
    assert flops(jaxpr.jaxpr) == 3 * (2 * 4 * 8 * 8) + 2 * (2 * 4 * 4 * 5) * (3 * 3 * 3)


def row(**changes):
    counts = ("launches", "copies", "collectives", "collective_bytes")
    base: dict[str, Any] = dict.fromkeys(counts, 100)
    base |= {"peak_bytes": 1000, "moved_bytes": 10, "times": 1, "loops": [], "kinds": {}}
    return base | changes


def test_the_guard_allows_a_tenth():
    before = {"Pong": {"update": row(), "act": row()}}
    assert grown({"Pong": {"update": row(launches=110)}}, before) == []
    assert grown({"Pong": {"update": row(launches=50), "act": row()}}, before) == []
    worse = {"Pong": {"update": row(launches=111), "act": row(peak_bytes=1200)}}
    assert grown(worse, before) == [
        "Pong, update: launches 100 -> 111",
        "Pong, act: peak_bytes 1,000 -> 1,200",
    ]


def test_stages_add_up_to_an_update():
    found = {
        "update": row(),
        "staged prepare": row(launches=7, peak_bytes=5),
        "staged gradient_sums": row(launches=10, times=16, peak_bytes=9),
    }
    whole = totals(found)
    assert set(whole) == {"update", "staged update"}
    staged = whole["staged update"]
    assert (staged["launches"], staged["peak_bytes"], staged["calls"]) == (7 + 160, 9, 17)


def test_the_table_shows_what_was_before():
    case = "Pong 64, 1 x A100"
    now = {case: {"update": row(launches=900, flops=2e9, loops=[16, None])}}
    text = gpu_programs.report(now, {case: {"update": row(launches=61635)}}, "command")
    assert f"| {case} | update | 900 | 61,635 | 16, ? | 100 | 100 |" in text


def test_predicted_seconds_add_up():
    card = Card(bandwidth=1e9, flops=1e9, link=1e9)
    given = Assumptions(launch_s=1e-3, bandwidth_share=0.5, flops_share=0.25, collective_s=0.01)
    found = row(launches=10, moved_bytes=1e9, flops=5e8, collectives=3, collective_bytes=1e9)
    # 10 ms, 2 s, 2 s; around four cards 1.5 times the bytes, and three times 10 ms
    assert predicted_s(found, card, 4, given) == pytest.approx(0.01 + 2 + 2 + 1.5 + 0.03)
    alone = found | {"collectives": 0}
    assert predicted_s(alone, card, 1, given) == pytest.approx(4.01)


def test_cards_are_known_by_their_names():
    assert gpu_check.card_of("NVIDIA A100-SXM4-80GB") == "A100"
    assert gpu_check.card_of("NVIDIA GeForce RTX 4090") is None


def test_names_of_cases_are_different():
    assert len({case.name for case in CASES}) == len(CASES)


NEEDS = "needs the CUDA plugin (5.6 GB), which `python -m benchmarks.gpu_programs` installs"


@pytest.mark.slow
@pytest.mark.skipif(not CUDA.is_built(), reason=NEEDS)
def test_programs_of_a_run_compile_for_gpus():
    flags = (
        "--env.num-envs", "16", "--algo.num-steps", "8", "--algo.epochs", "1",
        "--algo.minibatches", "2",
    )  # fmt: skip
    found = gpu_programs.compiled(Case("small", "cartpole", flags, 2, programs=("update", "act")))
    update, act = found["update"], found["act"]
    assert update["collectives"] >= 2  # one for each minibatch
    assert update["reused_bytes"] > 0  # the old state's memory
    assert 0 < act["launches"] < update["launches"]
