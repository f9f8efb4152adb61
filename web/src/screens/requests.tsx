import { Empty } from "../components/base";

export function RequestsScreen() {
  return <Empty title="Not built yet" />;
}
