import { Empty } from "../components/base";

export function RequestDetailScreen({ id }: { id: string }) {
  return <Empty title={`Request ${id}`} />;
}
