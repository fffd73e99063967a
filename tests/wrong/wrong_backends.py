"""Attention backends that are wrong, each in one way."""

from dataclasses import replace

import torch

from runnerctl.runner.attention.sdpa import SdpaBackend


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
    def prepare(self, batch):
        return [self.change(request, batch, i) for i, request in enumerate(super().prepare(batch))]


class ReadsPastTheEnd(ChangesRequests):
    """Of a request's last block."""

    def change(self, request, batch, i):
        if request.end - request.start > 1 or request.seq_len == 1:
            return request
        return replace(request, seq_len=len(request.block_ids) * self._block_size)


class ForgetsThePrefix(ChangesRequests):
    """Looks at this step's tokens only."""

    def change(self, request, batch, i):
        return replace(request, seq_len=request.end - request.start)


class TakesBlocksInOrder(ChangesRequests):
    def change(self, request, batch, i):
        return replace(request, block_ids=request.block_ids.sort().values)


class LooksAheadInChunks(SdpaBackend):
    """No causal mask where a chunk follows a cached prefix."""

    def forward(self, query, key, value, cache, layer, metadata):
        output = super().forward(query, key, value, cache, layer, metadata)
        for request in metadata:
            num_queries = request.end - request.start
            if 1 < num_queries < request.seq_len and layer.sliding_window is None:
                single = replace(request, start=0, end=1)
                for row in range(request.start, request.end):
                    output[row] = super().forward(
                        query[row : row + 1], key, value, cache, layer, [single]
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
        cache.key[metadata[0].block_ids[0], 0] = 0
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
