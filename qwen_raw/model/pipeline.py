"""A model in stages: every device holds some of the layers and hands the hidden state on by put-with-signal.

A decode step is one graph a stage. The first stage embeds the id; each takes the hidden state from the one before it
and puts its own to the next; the last chooses an id and puts {id, position} to all others, whose next step begins with
it. So the host queues steps ahead as for one device, and reads the last stage's ring. Stages work one after another:
batch 1 gets room for a larger model, not speed. The kernels are one device's, so ids and hashes are too.

    stage 0       embed · layers · put h ················································ wait state
    stage 1                         wait h · layers · LM head, choice · put state
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from qwen_raw.comm.signal import SignalChannel
from qwen_raw.config import ModelConfig
from qwen_raw.device import BF16, Device
from qwen_raw.errors import UsageError
from qwen_raw.generation.runner import Progress
from qwen_raw.kernels.linear import Linear
from qwen_raw.kernels.peers import ranks_on_gpu
from qwen_raw.kernels.sample import Sampler
from qwen_raw.model.assembly import check_memory, section
from qwen_raw.model.decode import DEFAULT, StepOptions, level
from qwen_raw.model.kv_fp8 import fold
from qwen_raw.model.loading import CheckpointLike, Part, WeightLoader
from qwen_raw.model.prefill import prefill_chunk
from qwen_raw.model.rank import Rank
from qwen_raw.model.residual import Alone
from qwen_raw.model.runner import DeviceRunner
from qwen_raw.model.shard import Shard
from qwen_raw.model.state import DecodeBuffers, KVCache, PrefillBuffers, device_rope_table
from qwen_raw.model.weights import Weights, check_shapes, load_layer, weight_bytes

NOT_FIRST, NOT_LAST = frozenset({"embed"}), frozenset({"head", "sample"})


@dataclass(frozen=True, slots=True)
class Links:
    """A stage's channels; one stage alone has none."""

    before: SignalChannel | None = None  # hidden states from the stage before
    after: SignalChannel | None = None  # to the next one
    state_from: SignalChannel | None = None  # {id, position, …} from the last stage; the last has none
    state_to: tuple[SignalChannel, ...] = ()  # the last stage's, to all others


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(Rank):
    """A rank with some of the layers. The stages' work may be queued one stage after another, the first one first."""

    links: Links

    def step(self, options: StepOptions = DEFAULT) -> Iterator[None]:
        """See Rank. Without the "reduce" stage nothing is waited for, and nothing handed over."""
        links = Links() if "reduce" in options.skip else self.links
        skip = options.skip | (NOT_FIRST if self.links.before else frozenset())
        skip |= NOT_LAST if self.links.after else frozenset()
        if links.before:
            links.before.wait(self.decode.h)
        for _ in Rank.step(self, replace(options, skip=skip)):
            pass
        if links.after:
            links.after.put(self.decode.h)
        if "sample" not in options.skip:
            self._hand_state(links)
        yield

    def prefill_chunk(
        self, rows: int, *, choose: bool = False, skip: frozenset[str] = frozenset(), layers: int | None = None
    ) -> Iterator[None]:
        """See Rank. Where sums over ranks are skipped nothing is waited for, and nothing handed over."""
        links = Links() if "reduce" in skip else self.links
        h = self.prefill.h.view((rows, self.shard.whole.D))
        if links.before:
            links.before.wait(h)
        for _ in prefill_chunk(
            self.device,
            self.shard.local,
            self.weights,
            self.cache,
            self.rope,
            self.prefill,
            self.residual,
            rows,
            skip,
            layers,
            embedded=self.links.before is None,
        ):
            pass
        if links.after:
            links.after.put(h)
        if choose:
            self.choose_first(rows)
            self._hand_state(links)
        yield

    def choose_first(self, rows: int) -> None:
        """See Rank: the last stage's work."""
        if self.chooses:
            Rank.choose_first(self, rows)

    def _hand_state(self, links: Links) -> None:
        """Put, or wait for, what the next step begins with."""
        for channel in links.state_to:
            channel.put(self.decode.sampler.state)
        if links.state_from:
            links.state_from.wait(self.decode.sampler.state)

    def fault(self) -> str | None:
        """See Rank; of the channels that this stage waits on."""
        channels = (self.links.before, self.links.after, self.links.state_from, *self.links.state_to)
        return next((said for channel in channels if channel and (said := channel.fault())), None)


def cuts(c: ModelConfig, stages: int) -> list[range]:
    """The layers of each stage. Raises UsageError where there are fewer layers than stages."""
    if not 0 < stages <= c.L:
        raise UsageError(f"{stages} stages of {c.L} layers: a stage has at least one")
    return [range(c.L * i // stages, c.L * (i + 1) // stages) for i in range(stages)]


def load_stage(
    dev: Device, checkpoint: CheckpointLike, layers: range, *, fp8: bool, progress: Progress | None
) -> Weights:
    """Some of the layers; the embedding for the first stage, the LM head for the last. Tables not needed are empty."""
    c, shard = checkpoint.config, Shard(checkpoint.config)
    first, last, table = layers.start == 0, layers.stop == c.L, (c.V, c.D)
    total = weight_bytes(Shard(replace(c, L=len(layers))), fp8)
    load, none = WeightLoader(dev, checkpoint, fp8=fp8, total=total, progress=progress), dev.empty((0, c.D), BF16)
    embed = head = none
    if first or (last and c.tied):
        embed = load.matrix(Part.of_rows("model.embed_tokens.weight", table, range(c.V)))
    loaded = tuple(load_layer(load, shard, f"model.layers.{i}.") for i in layers)
    norm = load.vector("model.norm.weight", c.D)
    if last:
        head = embed if c.tied else load.matrix(Part.of_rows("lm_head.weight", table, range(c.V)))
    load.finish()
    return Weights(embed, loaded, norm, Linear(head), fp8)


def link(devices: Sequence[Device], D: int, chunk: int, limit_ns: int) -> list[Links]:
    """Every stage's channels, for hidden states f32 of up to `chunk` rows and for the decode state."""
    last = len(devices) - 1

    def channel(source: int, target: int, nbytes: int) -> SignalChannel:
        return SignalChannel(devices[source], devices[target], nbytes, ranks=(source, target), limit_ns=limit_ns)

    hidden = [channel(i, i + 1, chunk * D * 4) for i in range(last)]
    states = [channel(last, i, 16) for i in range(last)]
    return [
        Links(before, after, state, tuple(states) if i == last else ())
        for i, (before, after, state) in enumerate(zip([None, *hidden], [*hidden, None], [*states, None], strict=True))
    ]


def assemble_stages(
    devices: Sequence[Device],
    checkpoint: CheckpointLike,
    *,
    fp8: bool,
    max_len: int,
    limit_ns: int,
    kv: str = "bf16",
    progress: Progress | None = None,
) -> list[Stage]:
    """One stage a device, in order; a GPU may have several. `kv`: type of the KV cache, "bf16" or "fp8".

    Raises QwenRawError where the model does not fit.
    """
    c = checkpoint.config
    layers = cuts(c, len(devices))
    parts = [Shard(replace(c, L=len(some))) for some in layers]
    for part in parts:
        check_shapes(part, fp8)
    check_memory(devices, parts, fp8=fp8, max_len=max_len, kv=kv)
    sizes = [weight_bytes(part, fp8) for part in parts]
    alone = [ranks_on_gpu(devices, i) == 1 for i in range(len(devices))]
    weights = [
        load_stage(dev, checkpoint, layers[i], fp8=fp8, progress=section(progress, sum(sizes[:i]), sum(sizes)))
        for i, dev in enumerate(devices)
    ]
    fits = [fold(*each) if kv == "fp8" else None for each in zip(devices, parts, weights, strict=True)]
    prefill = [
        PrefillBuffers.create(dev, part.local, max_len, fp8=fp8, pdl=own)
        for dev, part, own in zip(devices, parts, alone, strict=True)
    ]
    links = link(devices, c.D, prefill[0].chunk, limit_ns)
    return [
        Stage(
            device=dev,
            shard=part,
            weights=weights[i],
            cache=KVCache.create(dev, part.local, max_len, fits[i]),
            rope=device_rope_table(dev, part.local, max_len),
            decode=DecodeBuffers.create(dev, part.local, max_len, Sampler.create(dev, c.V)),
            prefill=prefill[i],
            residual=Alone(dev),
            shares_gpu=not alone[i],
            links=links[i],
        )
        for i, (dev, part) in enumerate(zip(devices, parts, strict=True))
    ]


class PipelineRunner(DeviceRunner):
    """Implements `qwen_raw.generation.runner.Runner` on one device a stage. Arguments: DeviceRunner's, less `comm`."""

    def _assemble(
        self,
        checkpoint: CheckpointLike,
        fp8: bool,
        max_len: int,
        *,
        comm: str,
        limit_ns: int,
        progress: Progress | None,
    ) -> Sequence[Rank]:
        """See DeviceRunner."""
        return assemble_stages(
            self.devices, checkpoint, fp8=fp8, max_len=max_len, limit_ns=limit_ns, kv=self.kv_dtype, progress=progress
        )

    def _load(self) -> None:
        """See DeviceRunner; and the choice of an id, which it leaves out where there are several ranks."""
        super()._load()
        last = self.ranks[-1]
        with last.device.rehearsing():
            level([last.step(StepOptions(skip=frozenset({"reduce"})))])
