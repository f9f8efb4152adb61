import { Empty } from "../components/base";

export function OperationsScreen() {
  return <Empty title="Not built yet" />;
}
