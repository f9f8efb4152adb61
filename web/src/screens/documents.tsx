import { Empty } from "../components/base";

export function DocumentsScreen({ id }: { id: string }) {
  return <Empty title={`Documents ${id}`} />;
}
