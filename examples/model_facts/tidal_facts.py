"""What the config of a Tidal model means: its words for layers, experts and context are its own.

    {"model_type": "tidal", "architectures": ["TidalForCausalLM"],
     "stream": "~~~o~~~o", "anchors": 16, "crew": 8, "reach": 65536}

A `~` in `stream` is a tide, which carries a state from token to token; an `o` is an
anchor, which is attention. `crew` is the number of experts in each layer.
"""

from runnerctl import FactOverrides, hookimpl

requires_runnerctl = ">=0.1,<2"


@hookimpl
def register_model_facts(config_json):
    stream = config_json.get("stream")
    if config_json.get("model_type") != "tidal" or not isinstance(stream, str) or not stream:
        return
    tides, anchors = stream.count("~"), stream.count("o")
    if tides + anchors != len(stream):
        return  # a newer Tidal: better nothing said than something wrong
    yield FactOverrides(
        f"its stream has {tides} tides, which are recurrent, and {anchors} anchors of attention",
        is_hybrid=bool(tides and anchors),
        is_attention_free=not anchors,
        num_hidden_layers=len(stream),
    )
    crew = config_json.get("crew", 1)
    if isinstance(crew, int):
        yield FactOverrides(f"each of its layers has a crew of {crew}", is_moe=crew > 1)
    if isinstance(config_json.get("reach"), int):
        # tides have no longest context; anchors do
        reach = config_json["reach"] if anchors else None
        yield FactOverrides("its reach is its context", max_position_embeddings=reach)
