"""Attention backends that are wrong, each in one way."""

from dataclasses import replace

import torch

from runnerctl.runner.attention.sdpa import SdpaBackend, SdpaMetadata


class ChangesLayers(SdpaBackend):
    def change(self, layer):
        raise NotImplementedError

    def forward(self, query, key, value, cache, layer, metadata):
        return super().forward(query, key, value, cache, self.change(layer), metadata)


class IgnoresTheWindow(ChangesLayers):
    def change(self, layer):
        return replace(layer, sliding_window=None)


class WindowIsOneTooLong(ChangesLayers):
    def change(self, layer):
        return replace(layer, sliding_window=layer.sliding_window and layer.sliding_window + 1)


class IgnoresSoftcap(ChangesLayers):
    def change(self, layer):
        return replace(layer, softcap=None)


class IgnoresTheScale(ChangesLayers):
    def change(self, layer):
        return replace(layer, scale=layer.head_size**-0.5)


class ChangesRequests(SdpaBackend):
    def prepare(self, batch, chosen=None):
        found = super().prepare(batch, chosen)
        decodes = tuple(self.change_decodes(group) for group in found.decodes)
        return SdpaMetadata(decodes, tuple(self.change(request) for request in found.others))

    def change_decodes(self, group):
        return group

    def change(self, request):
        return request


class ReadsPastTheEnd(ChangesRequests):
    """Of a decoding request's last block."""

    def change_decodes(self, group):
        rounded = -(-group.seq_lens // self.block_size) * self.block_size
        lengths = torch.where(group.seq_lens == 1, group.seq_lens, rounded)
        return replace(
            group, seq_lens=lengths, longest=int(lengths.max()), shortest=int(lengths.min())
        )


class ForgetsThePrefix(ChangesRequests):
    """A chunk looks at this step's tokens only."""

    def change(self, request):
        return replace(request, seq_len=request.end - request.start)


class TakesBlocksInOrder(ChangesRequests):
    def change_decodes(self, group):
        return replace(group, block_table=group.block_table.sort().values)

    def change(self, request):
        return replace(request, block_ids=request.block_ids.sort().values)


class LooksAheadInChunks(SdpaBackend):
    """No causal mask where a chunk follows a cached prefix."""

    def forward(self, query, key, value, cache, layer, metadata):
        output = super().forward(query, key, value, cache, layer, metadata)
        for request in metadata.others:
            num_queries = request.end - request.start
            if num_queries < request.seq_len and layer.sliding_window is None:
                single = SdpaMetadata((), (replace(request, start=0, end=1),))
                for row in range(request.start, request.end):
                    output[row] = super().forward(
                        query[row : row + 1], key, value, cache, layer, single
                    )
        return output


class MixesUpHeads(SdpaBackend):
    """Gives query head i the KV head i % num_kv_heads."""

    def forward(self, query, key, value, cache, layer, metadata):
        group = layer.num_heads // layer.num_kv_heads
        order = torch.arange(layer.num_heads).view(group, -1).T.flatten()
        output = super().forward(query[:, order], key, value, cache, layer, metadata)
        return output[:, order.argsort()]


class WritesToTheCache(SdpaBackend):
    def forward(self, query, key, value, cache, layer, metadata):
        output = super().forward(query, key, value, cache, layer, metadata)
        blocks = [group.block_table[0] for group in metadata.decodes]
        blocks += [request.block_ids for request in metadata.others]
        cache.key[blocks[0][0], 0] = 0
        return output


class PreparesForOneLayer(SdpaBackend):
    def prepare(self, batch):
        self.layer = None
        return super().prepare(batch)

    def forward(self, query, key, value, cache, layer, metadata):
        self.layer = self.layer or layer
        return super().forward(query, key, value, cache, self.layer, metadata)


class AnswersInFloat32(SdpaBackend):
    def forward(self, *arguments):
        return super().forward(*arguments).float()


class RoundsToHalf(SdpaBackend):
    def forward(self, query, *arguments):
        return super().forward(query, *arguments).half().to(query.dtype)


class ClaimsToBeCapturable(SdpaBackend):
    """And loops over the host's arrays."""

    capturable = True


class DeclinesWithoutAReason(SdpaBackend):
    @classmethod
    def why_not(cls, layer, device, dtype, block_size):
        return "" if layer.softcap else None
