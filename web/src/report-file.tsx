// A request's report as a file of its own: the page has its data in itself, and no server to ask.
import { render } from "preact";

import { DetailView } from "./detail/detail-view";
import type { Detail, Trace } from "./detail/types";
import "./styles/report-file.css";

interface Kept {
  question: string;
  detail: Detail;
  trace: Trace | null;
}

const root = document.getElementById("app");
const data = document.getElementById("data")?.textContent;
if (root && data) {
  const { question, detail, trace } = JSON.parse(data) as Kept;
  // The page shows the same without scripts, in short.
  root.replaceChildren();
  render(
    <div class="page">
      <h1 class="asked">{question || "What became of a prompt"}</h1>
      <DetailView detail={detail} trace={trace} noTrace="This report was made without its prompt." />
    </div>,
    root,
  );
}
