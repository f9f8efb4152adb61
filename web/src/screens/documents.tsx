// Documents: files in, their ingestion, what is stored of them, and whether a text would be reused.
import { useEffect } from "preact/hooks";

import { useMedia } from "../components/media";
import { hrefOf } from "../router";
import { loadSettings } from "../server";
import { CheckText } from "./documents/check";
import { DocumentView } from "./documents/detail";
import { JobList } from "./documents/job-list";
import { watchOpenJobs } from "./documents/jobs";
import { DocumentList } from "./documents/list";
import { Uploads } from "./documents/uploads";

export function DocumentsScreen({ id }: { id: string }) {
  useEffect(() => {
    void loadSettings();
    void watchOpenJobs();
  }, []);
  const wide = useMedia("(min-width: 1000px)");
  const list = (
    <div class="stack">
      <Uploads />
      <JobList />
      <DocumentList current={id} />
      <CheckText />
    </div>
  );
  if (!id) return <div class="page">{list}</div>;
  const view = <DocumentView key={id} id={id} />;
  if (!wide) {
    return (
      <div class="page">
        <a href={hrefOf("documents")}>‹ All documents</a>
        {view}
      </div>
    );
  }
  return (
    <div class="page two">
      {list}
      {view}
    </div>
  );
}
