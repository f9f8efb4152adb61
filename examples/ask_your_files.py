"""Ask questions about a folder of .txt, .md and .pdf files.

    python examples/ask_your_files.py FOLDER                    a conversation; an empty line ends it
    python examples/ask_your_files.py FOLDER "One question?"    one answer

The first run computes the KV of every passage and keeps it in FOLDER/.fused_kv; later runs find it there. Questions can
be asked as soon as plain KV is stored. Passages are preprocessed in the background while you read and type.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

print("Loading the libraries ...", flush=True)

from langchain_community.vectorstores import FAISS
from langchain_core.documents import Document
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough

from fused_kv_llm import FusedKVError
from fused_kv_llm.demo import MiniLM, read_passages
from langchain_fused_kv import FusedKVLLM, FusedKVRetriever

PROMPT = "Answer the question from these passages.\n\n{context}\n\nQuestion: {question}"


def format_docs(documents: list[Document]) -> str:
    return "\n\n".join(doc.page_content for doc in documents)


def build_chain(docs: list[Document], llm: FusedKVLLM, k: int) -> Runnable[str, str]:
    print(llm.build_kv_cache(docs).summary())
    found = FAISS.from_documents(docs, MiniLM()).as_retriever(search_kwargs={"k": k})
    retriever = FusedKVRetriever(retriever=found, llm=llm)
    context = {"context": retriever | format_docs, "question": RunnablePassthrough()}
    return context | PromptTemplate.from_template(PROMPT) | llm


def answer(chain: Runnable[str, str], llm: FusedKVLLM, question: str) -> None:
    for piece in chain.stream(question):
        print(piece, end="", flush=True)
    if report := llm.last_report:
        reused = f"{report.cached_tokens} of {report.prompt_tokens} prompt tokens reused"
        print(f"\n[first token after {report.ttft_s:.2f} s, {reused}]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask questions about a folder of files.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("question", nargs="?")
    parser.add_argument("--model", default="smollm2-135m", help="embedded model, hub id or local folder")
    parser.add_argument("--ratio", type=float, default=0.15, help="share of passage tokens to recompute")
    parser.add_argument("-k", type=int, default=5, help="passages per question")
    args = parser.parse_args()
    print(f"Reading {args.folder} and loading {args.model} ...", flush=True)
    try:
        passages = read_passages([args.folder])
        docs = [Document(passage.text, metadata={"source": passage.source}) for passage in passages]
        kv_dir = args.folder / ".fused_kv"
        llm = FusedKVLLM(model=args.model, kv_dir=kv_dir, recompute_ratio=args.ratio, max_tokens=128)
        with llm:
            chain = build_chain(docs, llm, args.k)
            if args.question:
                answer(chain, llm, args.question)
                return
            while question := input("Question: ").strip():
                answer(chain, llm, question)
    except FusedKVError as error:
        sys.exit(f"Error: {error}")
    except (KeyboardInterrupt, EOFError):
        print()


if __name__ == "__main__":
    main()
