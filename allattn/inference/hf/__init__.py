"""allattn in transformers: importing this registers its classes with `AutoConfig` and the others.

```python
import allattn.inference.hf
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("exports/demo")
```
"""

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from allattn.inference.hf.configuration_allattn import AllattnConfig
from allattn.inference.hf.modeling_allattn import AllattnCache, AllattnForCausalLM
from allattn.inference.hf.tokenization_allattn import AllattnTokenizer
from allattn.inference.travel import write_code

__all__ = ["AllattnCache", "AllattnConfig", "AllattnForCausalLM", "AllattnTokenizer"]

AutoConfig.register("allattn", AllattnConfig)
AutoModelForCausalLM.register(AllattnConfig, AllattnForCausalLM)
AutoTokenizer.register(AllattnConfig, slow_tokenizer_class=AllattnTokenizer)
AllattnForCausalLM._write_code = staticmethod(write_code)
