"""CircuitsVis on a DCFormer: heads of one layer, with signs, in an HTML file.

    pip install "circuitsvis>=1.43"
    python examples/with_circuitsvis.py --output heads.html

Composed weights are not probabilities: `attention_heads` can show signs and needs the range of values; CircuitsVis's
`attention_patterns`, and BertViz, draw values from 0 to 1 only. Give those `trace.layers[n].weights`, the attention
weights before composition. The page loads the library's script from a content network; `dcformer.analysis.html` makes
pages that need none.
"""

import argparse
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from dcformer.analysis import AnalysisTrace, trace
from dcformer.analysis.plots import THEMES
from dcformer.errors import DCFormerError

CHECKPOINT = Path(__file__).resolve().parent.parent / "checkpoints" / "dcformer-synthetic"
PROMPT = "\n< Peter owns the desk. Boris owns the tuna. Olga owns the banana. >. Boris owns a kind of"


def signed_heads(run: AnalysisTrace, layer: int, which: str = "composed_weights") -> Any:
    """CircuitsVis's view of a layer's heads with the arguments that signed maps need.

    Args:
        run: a trace with tokens.
        layer: its number.
        which: the maps.
    """
    from circuitsvis.attention import attention_heads

    maps = getattr(run.layer(layer), which)[0]  # [H, T, T]
    limit = maps.abs().max().item()
    return attention_heads(
        attention=maps.numpy(),
        tokens=run.tokens,
        negative_color=THEMES["light"].negative,
        positive_color=THEMES["light"].positive,
        min_value=-limit,
        max_value=limit,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default=str(CHECKPOINT))
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("heads.html"))
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, attn_implementation="eager")
    run = trace(model, tokenizer(PROMPT, return_tensors="pt"), tokenizer=tokenizer)
    try:
        view = signed_heads(run, options.layer)
    except DCFormerError as error:
        parser.error(str(error))
    except ImportError as error:
        parser.error(f'{error}: pip install "circuitsvis>=1.43"')
    options.output.write_text(str(view), encoding="utf-8")
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
