"""Protocols with one mistake each, made from the real kernels by an edit: what torture has to find.

The mistakes are ones that public code has made. An edit that no longer fits its kernel is an error: a variant is
always today's kernel but for the one place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from qwen_raw import paths
from qwen_raw.errors import QwenRawError

Edit = tuple[str, str]  # (text as it is, text as it would be with the mistake)


@dataclass(frozen=True, slots=True)
class Variant:
    """`case` of `qwen_raw.simt.cases` with edits to the kernel file `stem`, or to a header that is then inlined."""

    name: str
    case: str
    stem: str
    why: str
    edits: tuple[Edit, ...] = ()
    header: str | None = None  # of cuda_src/include, whose text the header_edits change
    header_edits: tuple[Edit, ...] = field(default=())
    race: bool = False  # shows under the race checker, not in values
    weak_local: bool = False  # shows only if stores to own memory can be late
    least_ranks: int = 2

    def source(self) -> str:
        """The kernel file with the mistake. Raises QwenRawError if an edit does not fit exactly once."""
        root = paths.cuda_src()
        text = _apply((root / f"{self.stem}.cu").read_text(), self.edits, self.name)
        if self.header is None:
            return text
        header = _apply((root / "include" / self.header).read_text(), self.header_edits, self.name)
        header = header.replace("#pragma once\n", "\n").replace('#include "', '#include "include/')
        include = f'#include "include/{self.header}"\n'
        below = text[: text.find(include)].count("\n") + 2
        # Reports and traces name the files as they are.
        header = f'#line 1 "include/{self.header}"\n{header}#line {below} "{self.stem}.cu"\n'
        return _apply(text, ((include, header),), self.name)

    def write(self, folder: Path) -> None:
        """Put the file where a Library can find it (kernel_folders)."""
        (folder / f"{self.stem}.cu").write_text(self.source())


def _apply(text: str, edits: tuple[Edit, ...], name: str) -> str:
    for old, new in edits:
        if text.count(old) != 1:
            raise QwenRawError(
                f"known-bad variant {name}: its edit fits {text.count(old)} times, not once: {old[:60]!r}"
            )
        text = text.replace(old, new)
    return text


_SIGNAL = """    __threadfence_system();
    st_release_sys_u32(end.word(peer, epoch, end.rank), epoch);
"""
_NO_FENCE = ((_SIGNAL, "    st_volatile_u32(end.word(peer, epoch, end.rank), epoch);\n"),)
_BARRIER = "// Block-wide barrier with the same block of every rank."
_COUNTER_BARRIER = """
DEVICE void counter_barrier(const Flags& end, uint32_t epoch, Watch& watch) {
  const int peer = threadIdx.x;
  if (peer < end.world && peer != end.rank) {
    const uint32_t turn = ++*end.word(end.rank, 1, peer);  // this block's barriers so far
    red_release_sys_add_u32(end.word(peer, 0, peer), 1);
    const uint32_t* mine = end.word(end.rank, 0, end.rank);
    while (ld_acquire_sys_u32(mine) < turn * (end.world - 1)) watch_poll(watch, end.rank, peer, epoch);
  }
  __syncthreads();
}

"""
_PUSH_BY_THREADS = (
    "  for (int i = mine + int(threadIdx.x); i < mine_stop; i += READS * step) {\n",
    "  for (int i = mine; i < mine_stop && int(threadIdx.x) < end.world; i += READS) {\n    const int step = 1;\n",
)
_PUSH_TO_ONE = (
    "for (int d = 0; d < end.world; d++) "
    "st_volatile_v4(end.results.packs((end.rank + d) % end.world) + half + i + k * step, packed);",
    "st_volatile_v4(end.results.packs(threadIdx.x) + half + i + k * step, packed);",
)
_LAMPORT_WAIT = (
    "  griddep_wait_with(number(turns) | number(item.from) | number(item.route.to[0]) | number(item.out.at));\n"
)
_HOLE = (
    "DEVICE bool has_hole(uint4 v) "
    "{ return v.x == SENTINEL || v.y == SENTINEL || v.z == SENTINEL || v.w == SENTINEL; }\n"
)

VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(
            "two_buffers",
            "allreduce_lamport",
            "allreduce_lamport",
            "two buffers: the one re-armed in call f is the one that a fast peer already fills for call f + 1",
            header="lamport.cuh",
            header_edits=(("constexpr int BUFFERS = 3;", "constexpr int BUFFERS = 2;"),),
        ),
        Variant(
            "no_fence",
            "allreduce_twoshot",
            "allreduce_twoshot",
            "the flag is a plain store: it can arrive before the payload that was stored first",
            header="flags.cuh",
            header_edits=_NO_FENCE,
        ),
        Variant(
            "no_fence_own",
            "allreduce_flag",
            "allreduce_flag",
            "the same with a payload in own memory: that too may become visible after the flag",
            header="flags.cuh",
            header_edits=_NO_FENCE,
            weak_local=True,
        ),
        Variant(
            "monotone_counter",
            "allreduce_twoshot",
            "allreduce_twoshot",
            "one counter; thread t stores to and signals peer t alone: a fast peer's next signal counts for a late one",
            edits=(
                _PUSH_BY_THREADS,
                _PUSH_TO_ONE,
                (
                    "  block_barrier(end, epoch - 1, ",
                    "  __syncthreads();\n  counter_barrier(end, epoch - 1, ",
                ),
                ("  block_barrier(end, epoch, ", "  counter_barrier(end, epoch, "),
            ),
            header="flags.cuh",
            header_edits=((_BARRIER, _COUNTER_BARRIER + _BARRIER),),
            least_ranks=3,
        ),
        Variant(
            "overwritten_flag",
            "allreduce_flag",
            "allreduce_flag",
            "one word a source: a fast peer overwrites epoch e with e + 1 before it was seen, and != waits for ever",
            header="flags.cuh",
            header_edits=(("((epoch & 1) * blocks + blockIdx.x)", "(blockIdx.x)"),),
        ),
        Variant(
            "one_payload",
            "allreduce_flag",
            "allreduce_flag",
            "one payload buffer, no barrier at the end: a fast rank's next call overwrites what a slow one still reads",
            edits=(("const int64_t half = int64_t(epoch & 1) * end.capacity;", "const int64_t half = 0;"),),
        ),
        Variant(
            "float_sentinel",
            "allreduce_lamport",
            "allreduce_lamport",
            "the sentinel compared as a float under flush-to-zero: negative subnormals look like -0.0",
            header="lamport.cuh",
            header_edits=(
                (
                    _HOLE,
                    "DEVICE bool minus_zero_after_ftz(uint32_t w) { return w >> 31 && !(w & 0x7f800000u); }\n"
                    "DEVICE bool has_hole(uint4 v) {\n"
                    "  return minus_zero_after_ftz(v.x) || minus_zero_after_ftz(v.y) || minus_zero_after_ftz(v.z) ||\n"
                    "         minus_zero_after_ftz(v.w);\n}\n",
                ),
            ),
        ),
        Variant(
            "one_word",
            "allreduce_lamport",
            "allreduce_lamport",
            "one word of four is polled: a 16-byte store may arrive in pieces",
            header="lamport.cuh",
            header_edits=((_HOLE, "DEVICE bool has_hole(uint4 v) { return v.x == SENTINEL; }\n"),),
        ),
        Variant(
            "wrong_length",
            "allreduce_lamport",
            "allreduce_lamport",
            "the buffer is re-armed with this call's length: after a shorter call old words pass for new ones",
            edits=(("  rearm(end, turn);\n", "  rearm(end, {turn.start, uint32_t(n), 0});\n"),),
        ),
        Variant(
            "first_thread_rotates",
            "allreduce_lamport",
            "allreduce_lamport",
            "no barrier before the turn is advanced: threads that come later take the next call's buffer",
            edits=(("  __syncthreads();\n", ""),),
        ),
        Variant(
            "own_block_rotates",
            "allreduce_lamport",
            "allreduce_lamport",
            "a block advances its own turn alone: after a call of fewer blocks the others are out of step",
            header="lamport.cuh",
            header_edits=(("i < end.blocks; i += int(blockDim.x)", "i == block_number(); i += int(blockDim.x)"),),
        ),
        Variant(
            "early_rotation",
            "allreduce_lamport",
            "allreduce_lamport",
            "the rotation is read before griddep_wait: the previous call may not have advanced it yet",
            edits=(
                (
                    f"{_LAMPORT_WAIT}  const Turn turn = read_turn(turns);\n",
                    f"  const Turn turn = read_turn(turns);\n{_LAMPORT_WAIT}",
                ),
            ),
        ),
        Variant(
            "armed_first",
            "gemv_exchange",
            "gemv_exchange_bf16",
            "a slot is armed again when it is needed, not when it was read: a fast peer's row is wiped",
            header="exchange.cuh",
            header_edits=(
                (
                    "    uint32_t v = theirs ?",
                    "    if (theirs) st_volatile_u32(slot, SENTINEL);\n    uint32_t v = theirs ?",
                ),
                (
                    "    if (own) h[row] = old + total;\n    if (theirs) st_volatile_u32(slot, SENTINEL);\n",
                    "    if (own) h[row] = old + total;\n",
                ),
            ),
        ),
        Variant(
            "stays_taken",
            "gemv_exchange",
            "gemv_exchange_bf16",
            "what was taken is not armed again: two sums later old rows pass for new ones",
            header="exchange.cuh",
            header_edits=(("    if (theirs) st_volatile_u32(slot, SENTINEL);\n", ""),),
        ),
        Variant(
            "late_wait",
            "chain",
            "gemv_bf16",
            "h is read before griddep_wait: the previous kernel may not have written it yet",
            header="gemv.cuh",
            header_edits=(
                (
                    "  engine.wait(x, K);\n  engine.input();\n  h += rows.begin;\n"
                    "  const float old = j < rows.count ? h[j] : 0.f;\n",
                    "  h += rows.begin;\n  const float old = j < rows.count ? h[j] : 0.f;\n"
                    "  engine.wait(x, K);\n  engine.input();\n",
                ),
            ),
            least_ranks=1,
        ),
        Variant(
            "arrival_as_flag",
            "attn_decode",
            "attn_decode",
            "the last cluster to arrive takes the partials as they are: the relaxed arrivals may have overtaken them",
            edits=(("while (most == HOLE)", "while (false)"),),
            weak_local=True,
            least_ranks=1,
        ),
        Variant(
            "early_push",
            "attn_decode",
            "attn_decode",
            "pushes without the cluster's barrier before them: the block that is pushed to may not have started",
            edits=(("    cluster_wait();\n", ""),),
            least_ranks=1,
        ),
        Variant(
            "early_keys",
            "attn_decode",
            "attn_decode",
            "the newest key is read with the others, before griddep_wait",
            edits=(
                ("if (k0[i] >= min(s.end, pos)) continue;", "if (k0[i] >= s.end) continue;"),
                (
                    "attn_fetch_k<F, HD>(tile[i], head, k0[i], 0, pos - 1);",
                    "attn_fetch_k<F, HD>(tile[i], head, k0[i], 0, s.end - 1);",
                ),
                ("    attn_fetch_k<F, HD>(tile[i], head, k0[i], pos, s.end - 1);\n", ""),
            ),
            least_ranks=1,
        ),
        Variant(
            "one_tag",
            "sample_ranks",
            "sample",
            "one tag of four is looked at: the other words of the pack may still be those of the step before the last",
            header="candidates.cuh",
            header_edits=(
                ("v.x >> 24 == tag && v.y >> 24 == tag && v.z >> 24 == tag && v.w >> 24 == tag", "v.x >> 24 == tag"),
            ),
        ),
        Variant(
            "early_ring",
            "signal",
            "signal",
            "the first block to have stored its share rings: the others' may not have arrived",
            edits=(("(arrived, gridDim.x - 1) == gridDim.x - 1", "(arrived, gridDim.x - 1) == 0"),),
        ),
        Variant(
            "two_slots",
            "signal",
            "signal",
            "two slots and no credit: the producer overwrites what has not been taken",
            edits=(
                ("int64_t(k % count)", "int64_t(k % 2u)"),
                ("(credit) + count - k)", "(credit) + 2u - k)"),
                (
                    "    while (int32_t(ld_acquire_sys_u32(credit) + 2u - k) < 0) watch_poll(watch, rank, peer, k);\n",
                    "    watch.polls = 0;\n",
                ),
            ),
        ),
    )
}
