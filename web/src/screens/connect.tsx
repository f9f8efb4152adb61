// Connect: how programs ask this server, with its address and its model, and whether it is well.
import { useEffect, useState } from "preact/hooks";

import { apiKey, askText } from "../api/client";
import { Badge, Button, Panel, Stat } from "../components/base";
import { useResource } from "../components/resource";
import { count } from "../format";
import { loadSettings, settings, settingsError } from "../server";

export function ConnectScreen() {
  useEffect(() => void loadSettings(), []);
  const model = settings.value?.model ?? "MODEL";
  return (
    <div class="page">
      <Health />
      <Panel title="Ask from a program">
        <div class="body stack">
          <p>
            This server speaks OpenAI's protocol: point any client of it at <code>{location.origin}/v1</code>. Chunks that an
            application puts into its prompts are found by their text.
          </p>
          <Snippets snippets={snippetsOf(location.origin, model)} />
        </div>
      </Panel>
    </div>
  );
}

function Health() {
  const ready = useResource((signal) => askText("/ready", { signal }), []);
  const known = settings.value;
  const well = !ready.error && !settingsError.value;
  return (
    <Panel title="This server" actions={<Button onClick={ready.reload}>Check again</Button>}>
      <div class="body">
        <dl class="stats wide" aria-live="polite">
          <Stat
            name="State"
            value={
              <Badge tone={ready.loading ? "plain" : well ? "good" : "bad"}>
                {ready.loading ? "asking" : well ? "takes requests" : (ready.error ?? settingsError.value)}
              </Badge>
            }
          />
          <Stat name="Address" value={<code class="wrap">{location.origin}</code>} />
          <Stat name="Model" value={<span class="wrap">{known?.model ?? "–"}</span>} />
          <Stat name="Context" value={`${count(known?.context_length)} tokens`} />
          <Stat name="Selector" value={known?.selector ?? "–"} />
          <Stat name="Recompute ratio" value={String(known?.recompute_ratio ?? "–")} />
          <Stat name="Version" value={known?.version ?? "–"} />
        </dl>
      </div>
    </Panel>
  );
}

function Snippets({ snippets }: { snippets: [string, string][] }) {
  const [chosen, setChosen] = useState(0);
  const text = snippets[chosen]?.[1] ?? "";
  const onKeyDown = (event: KeyboardEvent) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = (chosen + step + snippets.length) % snippets.length;
    setChosen(next);
    document.getElementById(`tab-${next}`)?.focus();
  };
  return (
    <div class="snippets">
      <div role="tablist" aria-label="Clients" onKeyDown={onKeyDown}>
        {snippets.map(([name], number) => (
          <button
            type="button"
            key={name}
            role="tab"
            id={`tab-${number}`}
            aria-selected={number === chosen}
            aria-controls="snippet"
            tabIndex={number === chosen ? 0 : -1}
            onClick={() => setChosen(number)}
          >
            {name}
          </button>
        ))}
      </div>
      <div id="snippet" role="tabpanel" aria-labelledby={`tab-${chosen}`}>
        <Copy text={text} />
        <pre tabIndex={0}>{text}</pre>
      </div>
    </div>
  );
}

const SAID_MS = 1500;

function Copy({ text }: { text: string }) {
  const [said, setSaid] = useState("Copy");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setSaid("Copied");
    } catch {
      // Not allowed, or no clipboard: the text can be selected.
      setSaid("Select and copy it");
    }
    setTimeout(() => setSaid("Copy"), SAID_MS);
  };
  return (
    <Button class="copy" aria-live="polite" onClick={() => void copy()}>
      {said}
    </Button>
  );
}

/** Return the snippets; a key is named, never written out. */
function snippetsOf(origin: string, model: string): [string, string][] {
  const key = apiKey.value ? "KEY" : "any";
  const header = apiKey.value ? ` \\\n  -H 'Authorization: Bearer KEY'` : "";
  const base = JSON.stringify(`${origin}/v1`);
  const name = JSON.stringify(model);
  const body = JSON.stringify(
    {
      model,
      messages: [{ role: "user", content: "Which ships are there?" }],
      max_tokens: 64,
      fused_kv: { retrieve: { k: 4 } },
    },
    null,
    1,
  );
  return [
    [
      "openai",
      `from openai import OpenAI

client = OpenAI(base_url=${base}, api_key="${key}")
answer = client.chat.completions.create(
    model=${name},
    messages=[{"role": "user", "content": "Which ships are there?"}],
    max_tokens=64,
    extra_body={"fused_kv": {"retrieve": {"k": 4}}},  # answer from this server's documents
)
print(answer.choices[0].message.content)
print(answer.fused_kv["reused_tokens"], "tokens were reused")`,
    ],
    [
      "LangChain",
      `from langchain_openai import ChatOpenAI

llm = ChatOpenAI(model=${name}, base_url=${base}, api_key="${key}")
# Your chain as it is: retrieved chunks are found in its prompts.
print(llm.invoke("Which ships are there?").content)`,
    ],
    [
      "LlamaIndex",
      `from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(model=${name}, api_base=${base}, api_key="${key}", is_chat_model=True)
print(llm.complete("Which ships are there?"))`,
    ],
    ["curl", `curl ${origin}/v1/chat/completions -H 'Content-Type: application/json'${header} \\\n  -d '${shell(body)}'`],
    ["Documents", `curl ${origin}/v1/documents${header} -F file=@handbook.pdf\ncurl ${origin}/v1/documents${header}`],
  ];
}

/** Return a text that may stand between a shell's single quotes. */
function shell(text: string): string {
  return text.replaceAll("'", `'\\''`);
}
