// Examples of each tab by language; each has one text per field.
export const EXAMPLES = {
  fill: {
    en: [["The capital of France is [MASK]."], ["The [MASK] was too [MASK] to cross the river."],
      ["She opened the book and began to [MASK]."]],
    ko: [["대한민국의 수도는 [MASK]이다."], ["나는 오늘 학교에 [MASK]."], ["그는 1950년에 서울에서 [MASK]."]],
  },
  pair: {
    en: [["The old man opened the door.", "He looked into the dark garden."],
      ["The old man opened the door.", "Penguins are birds that do not fly."]],
    ko: [["비가 많이 왔다.", "그래서 우산을 샀다."], ["비가 많이 왔다.", "펭귄은 날지 못하는 새이다."]],
  },
  classify: {
    en: [["The film is a quiet joy from its first minute to its last.", ""],
      ["She the book gave to him yesterday quickly of.", ""],
      ["A man is playing a guitar.", "Someone plays an instrument."]],
    ko: [["이 영화 정말 재미있어요.", ""], ["시간이 아까운 영화였다.", ""],
      ["한 남자가 기타를 치고 있다.", "누군가 악기를 연주한다."]],
  },
  tag: {
    en: [["Angela Merkel visited Siemens in Munich before she flew to Paris."],
      ["The United Nations met in Geneva on Monday, said John Smith of Reuters."]],
    ko: [["김연아는 서울에서 삼성 직원을 만났다."], ["세종대왕은 1397년 한양에서 태어났다."]],
  },
  answer: {
    en: [["Where did the smith work?", "The smith worked in a forge at the edge of the village. He had learnt his trade in Prague, and his hammer was older than he was."],
      ["Who wrote the book?", "The book was printed in 1605. Miguel de Cervantes wrote it, and it was read all over Europe within a few years."]],
    ko: [["언제 태어났습니까?", "세종대왕은 1397년에 한양에서 태어났다. 그는 1443년에 훈민정음을 만들었다."]],
  },
  choose: {
    en: [["He put the cup under the tap and", "filled it with water.\nread it aloud.\nmarried it.\nflew to the moon."],
      ["The children ran outside because", "it had begun to snow.\nthe soup was blue.\nnumbers are even."]],
    ko: [["배가 고파서", "밥을 먹었다.\n하늘이 되었다."], ["아이들은 밖으로 뛰어나갔다. 왜냐하면", "눈이 오기 시작했기 때문이다.\n숫자가 짝수이기 때문이다."]],
  },
  rerank: {
    en: [["Where do fish live?", "Fish live in water.\nBirds fly south in winter.\nMost fish live in the sea or in rivers.\nThe shop sells shoes."],
      ["How long is the flight to Paris?", "Paris is the capital of France.\nThe flight takes two hours.\nThe museum is closed on Mondays."]],
    ko: [["물고기는 어디에 사는가?", "물고기는 물에서 산다.\n새는 겨울에 남쪽으로 날아간다.\n가게에서 신발을 판다."]],
  },
  similarity: {
    en: [["A cat sleeps on the sofa.\nA kitten naps on the couch.\nThe stock market fell sharply.\nShares lost value today.\nShe is cooking dinner."],
      ["How do I reset my password?\nI forgot my login.\nWhere is my order?\nMy parcel has not arrived."]],
    ko: [["고양이가 소파에서 잔다.\n새끼 고양이가 낮잠을 잔다.\n주식 시장이 크게 하락했다.\n오늘 주가가 떨어졌다.\n그녀는 저녁을 만들고 있다."]],
  },
  word: {
    en: [["bank", "He sat on the bank of the river and fished.\nThe bank raised its interest rates again.\nThey swam to the other bank before dark.\nShe opened an account at a bank in the city.\nReeds grew along the muddy bank.\nThe bank refused to lend him the money."],
      ["light", "The light in the kitchen was still on.\nHer bag was light enough to carry.\nA light meal is best before running.\nThe light of the moon fell on the snow."]],
    ko: [["배", "배가 고파서 밥을 먹었다.\n항구에 큰 배가 들어왔다.\n시장에서 배를 두 개 샀다."]],
  },
  attention: {
    en: [["The cat sat on the mat because it was tired.", ""],
      ["The old man opened the door.", "He looked into the dark garden."]],
    ko: [["고양이가 피곤해서 소파 위에 앉았다.", ""], ["비가 많이 왔다.", "그래서 우산을 샀다."]],
  },
};
