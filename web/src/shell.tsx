// The frame around every screen: navigation, theme, the key, keyboard help.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { KeyBar } from "./components/key-bar";
import { Button, Dialog } from "./components/base";
import { KEYS, useShortcuts } from "./keyboard";
import { hrefOf, route } from "./router";
import { ChatScreen } from "./screens/chat";
import { CompareScreen } from "./screens/compare";
import { ConnectScreen } from "./screens/connect";
import { DocumentsScreen } from "./screens/documents";
import { OperationsScreen } from "./screens/operations";
import { RequestDetailScreen } from "./screens/request";
import { RequestsScreen } from "./screens/requests";
import { THEMES, theme } from "./theme";

const SCREENS: readonly [string, string][] = [
  ["chat", "Chat"],
  ["documents", "Documents"],
  ["requests", "Requests"],
  ["compare", "Compare"],
  ["operations", "Operations"],
  ["connect", "Connect"],
];

export function Shell() {
  const [help, setHelp] = useState(false);
  const { screen, id } = route.value;
  const main = useRef<HTMLElement>(null);
  const nav = useRef<HTMLElement>(null);
  const name = SCREENS.find(([one]) => one === screen)?.[1] ?? "Not found";
  const isFirst = useRef(true);
  useEffect(() => {
    document.title = `${name} · fused_kv_llm`;
    main.current?.scrollTo(0, 0);
    seen(nav.current?.querySelector("[aria-current]"));
    // What had the focus is gone with the screen before.
    if (!isFirst.current && document.activeElement === document.body) main.current?.focus({ preventScroll: true });
    isFirst.current = false;
  }, [screen, id, name]);
  useShortcuts(() => setHelp(true));
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), main.current?.focus())}>
        To the content
      </a>
      <header class="top">
        <a class="brand" href={hrefOf("chat")}>
          <img src="/assets/icon.svg" alt="" width={22} height={22} />
          <span>fused_kv_llm</span>
        </a>
        <nav ref={nav} aria-label="Screens" onFocusCapture={(event) => seen(event.target as Element)}>
          {SCREENS.map(([one, words]) => (
            <a key={one} href={hrefOf(one)} aria-current={one === screen ? "page" : undefined}>
              {words}
            </a>
          ))}
        </nav>
        <div class="tools">
          <select aria-label="Theme" value={theme.value} onChange={(event) => (theme.value = event.currentTarget.value as never)}>
            {THEMES.map((one) => (
              <option key={one}>{one}</option>
            ))}
          </select>
          <Button kind="quiet" label="Keyboard help" onClick={() => setHelp(true)}>
            ?
          </Button>
        </div>
      </header>
      <KeyBar />
      <main ref={main} id="main" tabIndex={-1} class={`screen screen-${screen}`}>
        <h1 class="unseen">{name}</h1>
        {screenOf(screen, id)}
      </main>
      {help && <Help onClose={() => setHelp(false)} />}
    </>
  );
}

/** Have a link seen whole; browsers leave one as it is that is seen in part. */
function seen(link: Element | null | undefined): void {
  link?.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function screenOf(screen: string, id: string): ComponentChildren {
  switch (screen) {
    case "chat":
      return <ChatScreen />;
    case "documents":
      return <DocumentsScreen id={id} />;
    case "requests":
      return id ? <RequestDetailScreen id={id} /> : <RequestsScreen />;
    case "compare":
      return <CompareScreen id={id} />;
    case "operations":
      return <OperationsScreen />;
    case "connect":
      return <ConnectScreen />;
    default:
      return <p>There is no such page.</p>;
  }
}

function Help({ onClose }: { onClose: () => void }) {
  return (
    <Dialog title="Keyboard" onClose={onClose}>
      <dl class="keys">
        {KEYS.map(([key, words]) => (
          <div key={key}>
            <dt>
              <kbd>{key}</kbd>
            </dt>
            <dd>{words}</dd>
          </div>
        ))}
      </dl>
    </Dialog>
  );
}
