import { Empty } from "../components/base";

export function CompareScreen() {
  return <Empty title="Not built yet" />;
}
